"""Who goes where: scores, selection, and the losses that keep experts balanced."""

from router.capacity import CapacityPolicy, Dropless, FixedCapacity, Placement
from router.config import RouterConfig
from router.losses import load_balance_loss, sequence_balance_loss, z_loss
from router.select import count_tokens_per_expert
from router.topk import RouterOutput, TopKRouter, no_autocast

__all__ = [
    "CapacityPolicy",
    "Dropless",
    "FixedCapacity",
    "Placement",
    "RouterConfig",
    "RouterOutput",
    "TopKRouter",
    "count_tokens_per_expert",
    "load_balance_loss",
    "no_autocast",
    "sequence_balance_loss",
    "z_loss",
]
