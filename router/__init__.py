"""Who goes where: scores, selection, and the losses that keep experts balanced."""

from router.capacity import (
    CapacityPolicy,
    Dropless,
    FixedCapacity,
    Placement,
    StragglerAwareCapacity,
)
from router.config import RouterConfig
from router.losses import load_balance_loss, sequence_balance_loss, z_loss
from router.plan import UNITS_PER_RANK, Balance, CapacityPlan
from router.select import count_tokens_per_expert
from router.topk import RouterOutput, TopKRouter, no_autocast

__all__ = [
    "UNITS_PER_RANK",
    "Balance",
    "CapacityPlan",
    "CapacityPolicy",
    "Dropless",
    "FixedCapacity",
    "Placement",
    "RouterConfig",
    "RouterOutput",
    "StragglerAwareCapacity",
    "TopKRouter",
    "count_tokens_per_expert",
    "load_balance_loss",
    "no_autocast",
    "sequence_balance_loss",
    "z_loss",
]
