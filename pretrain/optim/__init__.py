"""Optimizers and learning-rate schedules."""

from pretrain.optim.adamw import AdamWConfig, ElementwiseAdamW, build_adamw
from pretrain.optim.config import OptimizerFields, Surroundings
from pretrain.optim.muon import Muon, MuonConfig, orthogonalized
from pretrain.optim.registry import KINDS, OptimizerConfig, build_optimizer, with_kind
from pretrain.optim.schedule import ScheduleConfig
from pretrain.optim.state import moment_names, moments, set_lr, set_update_count

__all__ = [
    "KINDS",
    "AdamWConfig",
    "ElementwiseAdamW",
    "Muon",
    "MuonConfig",
    "OptimizerConfig",
    "OptimizerFields",
    "ScheduleConfig",
    "Surroundings",
    "build_adamw",
    "build_optimizer",
    "moment_names",
    "moments",
    "orthogonalized",
    "set_lr",
    "set_update_count",
    "with_kind",
]
