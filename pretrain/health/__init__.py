"""What a run does about its own health: pure decisions from numbers."""

from pretrain.health.capacity import CapacityBalance
from pretrain.health.sdc import (
    Finding,
    GradientPass,
    VerifyConfig,
    gradients_agree,
    judge_gradients,
    judge_states,
    machine_to_exclude,
    next_shifts,
)

__all__ = [
    "CapacityBalance",
    "Finding",
    "GradientPass",
    "VerifyConfig",
    "gradients_agree",
    "judge_gradients",
    "judge_states",
    "machine_to_exclude",
    "next_shifts",
]
