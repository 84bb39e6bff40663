"""The one logical state of a run: names, arrays, counters and random states."""

from typing import TYPE_CHECKING

from parallel.on_demand import on_demand
from pretrain.state.names import (
    EXPERT_BIAS,
    MODEL,
    MTP,
    ROUTER,
    array_path,
    dense_name,
    feed_forward,
    has_expert_dim,
    in_decoder,
    is_expert_matrix,
    name_in_layer,
    parameter_name,
    split_layer,
    weight_names,
)
from pretrain.state.progress import Progress
from pretrain.state.run_state import RunState, read_run_state, run_id_of, tokenizer_of

if TYPE_CHECKING:
    from pretrain.state.arrays import model_arrays, residual_arrays, training_arrays
    from pretrain.state.layouts import parameter_layouts
    from pretrain.state.rng import rng_arrays, rng_states, seed_rng, set_rng_states

__all__ = [
    "EXPERT_BIAS",
    "MODEL",
    "MTP",
    "ROUTER",
    "Progress",
    "RunState",
    "array_path",
    "dense_name",
    "feed_forward",
    "has_expert_dim",
    "in_decoder",
    "is_expert_matrix",
    "model_arrays",
    "name_in_layer",
    "parameter_layouts",
    "parameter_name",
    "read_run_state",
    "residual_arrays",
    "rng_arrays",
    "rng_states",
    "run_id_of",
    "seed_rng",
    "set_rng_states",
    "split_layer",
    "tokenizer_of",
    "training_arrays",
    "weight_names",
]


# On demand: the other names need neither torch nor the seconds of its import.
__getattr__ = on_demand(
    __name__,
    {
        "model_arrays": "pretrain.state.arrays",
        "parameter_layouts": "pretrain.state.layouts",
        "residual_arrays": "pretrain.state.arrays",
        "rng_arrays": "pretrain.state.rng",
        "rng_states": "pretrain.state.rng",
        "seed_rng": "pretrain.state.rng",
        "set_rng_states": "pretrain.state.rng",
        "training_arrays": "pretrain.state.arrays",
    },
)


def __dir__() -> list[str]:
    return __all__
