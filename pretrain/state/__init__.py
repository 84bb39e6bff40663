"""The one logical state of a run: names, arrays, counters and random states."""

from typing import TYPE_CHECKING, Any

from pretrain.state.names import (
    EXPERT_BIAS,
    MODEL,
    ROUTER,
    array_path,
    dense_name,
    feed_forward,
    has_expert_dim,
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
    "ROUTER",
    "Progress",
    "RunState",
    "array_path",
    "dense_name",
    "feed_forward",
    "has_expert_dim",
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

_WITH_TORCH = {
    "model_arrays": "pretrain.state.arrays",
    "parameter_layouts": "pretrain.state.layouts",
    "residual_arrays": "pretrain.state.arrays",
    "rng_arrays": "pretrain.state.rng",
    "rng_states": "pretrain.state.rng",
    "seed_rng": "pretrain.state.rng",
    "set_rng_states": "pretrain.state.rng",
    "training_arrays": "pretrain.state.arrays",
}


def __getattr__(name: str) -> Any:
    # On demand: the other names need neither torch nor the seconds of its import.
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_WITH_TORCH[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
