"""The one logical state of a run: names, arrays, counters and random states."""

from pretrain.state.arrays import model_arrays, residual_arrays, training_arrays
from pretrain.state.layouts import parameter_layouts
from pretrain.state.progress import Progress
from pretrain.state.rng import rng_arrays, rng_states, seed_rng, set_rng_states

__all__ = [
    "Progress",
    "model_arrays",
    "parameter_layouts",
    "residual_arrays",
    "rng_arrays",
    "rng_states",
    "seed_rng",
    "set_rng_states",
    "training_arrays",
]
