"""What a run does about its own health: pure decisions from numbers."""

from pretrain.health.capacity import CapacityBalance
from pretrain.health.stragglers import GainMeter, Straggler, Stragglers, StragglersConfig

__all__ = [
    "CapacityBalance",
    "GainMeter",
    "Straggler",
    "Stragglers",
    "StragglersConfig",
]
