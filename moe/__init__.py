"""The mixture-of-experts layer: route, dispatch, experts, combine."""

from moe.activation import ACTIVATIONS
from moe.config import MoEConfig, check_exact
from moe.deep_ep import DeepEPDispatcher, why_no_deep_ep
from moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    DispatchedRows,
    Dispatcher,
    LocalDispatcher,
    PaddedAllToAllDispatcher,
)
from moe.experts import GroupedExperts
from moe.float8 import (
    FLOAT8_OPERANDS,
    Float8Linear,
    Float8Tally,
    float8_linear,
    use_float8,
    why_no_float8,
)
from moe.layer import FeedForward, MoEAux, MoELayer, MoEOutput
from moe.paths import choose_backend
from moe.rows import Rows
from moe.stopwatch import Stopwatch
from moe.transformers_blocks import FusedExperts, TransformersMoE, adopt, collect_aux, restore
from router import CapacityConfig, DroplessConfig, FixedCapacityConfig, StragglerAwareConfig

__all__ = [
    "ACTIVATIONS",
    "FLOAT8_OPERANDS",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "CapacityConfig",
    "DeepEPDispatcher",
    "DispatchedRows",
    "Dispatcher",
    "DroplessConfig",
    "FeedForward",
    "FixedCapacityConfig",
    "Float8Linear",
    "Float8Tally",
    "FusedExperts",
    "GroupedExperts",
    "LocalDispatcher",
    "MoEAux",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "PaddedAllToAllDispatcher",
    "Rows",
    "Stopwatch",
    "StragglerAwareConfig",
    "TransformersMoE",
    "adopt",
    "check_exact",
    "choose_backend",
    "collect_aux",
    "float8_linear",
    "restore",
    "use_float8",
    "why_no_deep_ep",
    "why_no_float8",
]
