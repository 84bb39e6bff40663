"""What a run does about its own health: pure decisions from numbers."""

from pretrain.health.capacity import CapacityBalance
from pretrain.health.loss_outliers import LossOutlier, LossOutliers

__all__ = [
    "CapacityBalance",
    "LossOutlier",
    "LossOutliers",
]
