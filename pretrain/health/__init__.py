"""What a run does about its own health: pure decisions from numbers."""

from typing import TYPE_CHECKING

from parallel.on_demand import on_demand
from pretrain.health.memory import HealthMemory, Occurrence, SampleRange, merged

if TYPE_CHECKING:
    from pretrain.health.capacity import CapacityBalance
    from pretrain.health.config import ActionName, HealthConfig
    from pretrain.health.loss_outliers import LossOutlier, LossOutliers
    from pretrain.health.playbook import (
        Verdict,
        after_commit,
        after_going_back,
        after_skip,
        judge,
        routers_are_checked,
    )
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
    from pretrain.health.signals import Seen, Signal
    from pretrain.health.stragglers import (
        GainMeter,
        Straggler,
        Stragglers,
        StragglersConfig,
    )

__all__ = [
    "ActionName",
    "CapacityBalance",
    "Finding",
    "GainMeter",
    "GradientPass",
    "HealthConfig",
    "HealthMemory",
    "LossOutlier",
    "LossOutliers",
    "Occurrence",
    "SampleRange",
    "Seen",
    "Signal",
    "Straggler",
    "Stragglers",
    "StragglersConfig",
    "Verdict",
    "VerifyConfig",
    "after_commit",
    "after_going_back",
    "after_skip",
    "gradients_agree",
    "judge",
    "judge_gradients",
    "judge_states",
    "machine_to_exclude",
    "merged",
    "next_shifts",
    "routers_are_checked",
]


# On demand: progress.py needs the memory, without the seconds of torch's import.
__getattr__ = on_demand(
    __name__,
    {
        "CapacityBalance": "pretrain.health.capacity",
        "ActionName": "pretrain.health.config",
        "HealthConfig": "pretrain.health.config",
        "Seen": "pretrain.health.signals",
        "Signal": "pretrain.health.signals",
        "Verdict": "pretrain.health.playbook",
        "after_commit": "pretrain.health.playbook",
        "after_going_back": "pretrain.health.playbook",
        "after_skip": "pretrain.health.playbook",
        "GainMeter": "pretrain.health.stragglers",
        "Straggler": "pretrain.health.stragglers",
        "Stragglers": "pretrain.health.stragglers",
        "StragglersConfig": "pretrain.health.stragglers",
        "Finding": "pretrain.health.sdc",
        "GradientPass": "pretrain.health.sdc",
        "VerifyConfig": "pretrain.health.sdc",
        "gradients_agree": "pretrain.health.sdc",
        "judge_gradients": "pretrain.health.sdc",
        "judge_states": "pretrain.health.sdc",
        "machine_to_exclude": "pretrain.health.sdc",
        "next_shifts": "pretrain.health.sdc",
        "LossOutlier": "pretrain.health.loss_outliers",
        "LossOutliers": "pretrain.health.loss_outliers",
        "judge": "pretrain.health.playbook",
        "routers_are_checked": "pretrain.health.playbook",
    },
)


def __dir__() -> list[str]:
    return __all__
