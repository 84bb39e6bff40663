"""Detection of ranks that are stuck, slow or lost."""

from cluster.detect.hang import HangReport
from cluster.detect.heartbeat import (
    Heartbeat,
    HeartbeatPublisher,
    PhaseLimits,
    open_store,
    publish_seconds,
)
from cluster.detect.stuck import StuckRanks, StuckWatch

__all__ = [
    "HangReport",
    "Heartbeat",
    "HeartbeatPublisher",
    "PhaseLimits",
    "StuckRanks",
    "StuckWatch",
    "open_store",
    "publish_seconds",
]
