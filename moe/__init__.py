"""The mixture-of-experts layer: route, dispatch, experts, combine."""

from moe.config import MoEConfig
from moe.dispatch import AllToAllDispatcher, Dispatched, Dispatcher, LocalDispatcher
from moe.experts import GroupedExperts, choose_backend
from moe.layer import MoEAux, MoELayer, MoEOutput, SwiGLU

__all__ = [
    "AllToAllDispatcher",
    "Dispatched",
    "Dispatcher",
    "GroupedExperts",
    "LocalDispatcher",
    "MoEAux",
    "MoEConfig",
    "MoELayer",
    "MoEOutput",
    "SwiGLU",
    "choose_backend",
]
