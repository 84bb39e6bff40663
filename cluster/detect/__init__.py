"""Detection of ranks that are stuck or lost, of faulty devices, and of collectives that differ."""

from cluster.detect.devices import DeviceMonitor, DeviceReport
from cluster.detect.flight_recorder import (
    FlightDump,
    Mismatch,
    dump_collectives,
    first_mismatch,
    read_dumps,
    turn_on_flight_recorder,
)
from cluster.detect.hang import HangReport, open_store
from cluster.detect.heartbeat import (
    Heartbeat,
    HeartbeatPublisher,
    PhaseLimits,
    publish_seconds,
)
from cluster.detect.robust import MAD_TO_SIGMA, robust_scale
from cluster.detect.stuck import StuckRanks, StuckWatch

__all__ = [
    "MAD_TO_SIGMA",
    "DeviceMonitor",
    "DeviceReport",
    "FlightDump",
    "HangReport",
    "Heartbeat",
    "HeartbeatPublisher",
    "Mismatch",
    "PhaseLimits",
    "StuckRanks",
    "StuckWatch",
    "dump_collectives",
    "first_mismatch",
    "open_store",
    "publish_seconds",
    "read_dumps",
    "robust_scale",
    "turn_on_flight_recorder",
]
