"""The one logical state of a run: names, arrays, counters and random states."""

from pretrain.state.arrays import model_arrays, residual_arrays, training_arrays
from pretrain.state.layouts import parameter_layouts
from pretrain.state.progress import Progress
from pretrain.state.rng import rng_arrays, rng_states, seed_rng, set_rng_states
from pretrain.state.run_state import RunState, read_run_state, run_id_of

__all__ = [
    "Progress",
    "RunState",
    "model_arrays",
    "parameter_layouts",
    "read_run_state",
    "residual_arrays",
    "rng_arrays",
    "rng_states",
    "run_id_of",
    "seed_rng",
    "set_rng_states",
    "training_arrays",
]
