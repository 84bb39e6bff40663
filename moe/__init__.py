"""The mixture-of-experts layer: route, dispatch, experts, combine."""

from moe.activation import ACTIVATIONS
from moe.config import MoEConfig, check_exact
from moe.dispatch import (
    AllGatherDispatcher,
    AllToAllDispatcher,
    DispatchedRows,
    Dispatcher,
    LocalDispatcher,
    PaddedAllToAllDispatcher,
)
from moe.experts import GroupedExperts
from moe.layer import FeedForward, MoEAux, MoELayer, MoEOutput
from moe.paths import choose_backend
from moe.rows import Rows
from moe.stopwatch import Stopwatch
from moe.transformers_blocks import FusedExperts, TransformersMoE, adopt, collect_aux, restore
from router import CapacityConfig, DroplessConfig, FixedCapacityConfig, StragglerAwareConfig

__all__ = [
    "ACTIVATIONS",
    "AllGatherDispatcher",
    "AllToAllDispatcher",
    "CapacityConfig",
    "DispatchedRows",
    "Dispatcher",
    "DroplessConfig",
    "FeedForward",
    "FixedCapacityConfig",
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
    "restore",
]
