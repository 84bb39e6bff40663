"""Routing: scores, choice of experts, capacity, and the losses that balance experts."""

from router.capacity import (
    CapacityPolicy,
    Dropless,
    FixedCapacity,
    StragglerAwareCapacity,
)
from router.config import (
    CapacityConfig,
    DroplessConfig,
    FixedCapacityConfig,
    RouterConfig,
    StragglerAwareConfig,
)
from router.groups import HoldsGroups, LostGroup
from router.losses import load_balance_loss, sequence_balance_loss, z_loss
from router.placement import Placement
from router.plan import UNITS_PER_RANK, CapacityPlan, StragglerBalancer
from router.relative_speed import RelativeSpeeds, Shift, SpeedTest
from router.select import count_tokens_per_expert
from router.topk import RouterOutput, TopKRouter, no_autocast

__all__ = [
    "UNITS_PER_RANK",
    "CapacityConfig",
    "CapacityPlan",
    "CapacityPolicy",
    "Dropless",
    "DroplessConfig",
    "FixedCapacity",
    "FixedCapacityConfig",
    "HoldsGroups",
    "LostGroup",
    "Placement",
    "RelativeSpeeds",
    "RouterConfig",
    "RouterOutput",
    "Shift",
    "SpeedTest",
    "StragglerAwareCapacity",
    "StragglerAwareConfig",
    "StragglerBalancer",
    "TopKRouter",
    "count_tokens_per_expert",
    "load_balance_loss",
    "no_autocast",
    "sequence_balance_loss",
    "z_loss",
]
