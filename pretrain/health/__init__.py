"""What a run does about its own health: pure decisions from numbers."""

from pretrain.health.capacity import CapacityBalance

__all__ = [
    "CapacityBalance",
]
