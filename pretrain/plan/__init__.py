"""What a run will cost, before it starts."""

from pretrain.plan.failures import DEVICE_HOURS_PER_FAILURE, optimal_interval

__all__ = [
    "DEVICE_HOURS_PER_FAILURE",
    "optimal_interval",
]
