"""What people and machines see of a run: events, console, log and metrics."""

from typing import TYPE_CHECKING, Any

from pretrain.observe.console import Bar, Console, complain, human_bytes, say
from pretrain.observe.events import (
    CapacityPlanned,
    CheckpointCommitted,
    CheckpointFailed,
    Evaluated,
    Events,
    IntervalEnded,
    Notice,
    Restored,
    RoutingReport,
    RunDone,
    RunStarted,
    RunStopped,
    SaveBegun,
    SaveIntervalChosen,
    SpecChanged,
    StepCommitted,
    StepSkipped,
)
from pretrain.observe.jsonl import History, JsonlLog, read_log

if TYPE_CHECKING:
    from pretrain.observe.prometheus import Endpoint, Metrics
    from pretrain.observe.summary import Summary, show_summary

__all__ = [
    "Bar",
    "CapacityPlanned",
    "CheckpointCommitted",
    "CheckpointFailed",
    "Console",
    "Endpoint",
    "Evaluated",
    "Events",
    "History",
    "IntervalEnded",
    "JsonlLog",
    "Metrics",
    "Notice",
    "Restored",
    "RoutingReport",
    "RunDone",
    "RunStarted",
    "RunStopped",
    "SaveBegun",
    "SaveIntervalChosen",
    "SpecChanged",
    "StepCommitted",
    "StepSkipped",
    "Summary",
    "complain",
    "human_bytes",
    "read_log",
    "say",
    "show_summary",
]

_WITH_TORCH = {
    "Endpoint": "pretrain.observe.prometheus",
    "Metrics": "pretrain.observe.prometheus",
    "Summary": "pretrain.observe.summary",
    "show_summary": "pretrain.observe.summary",
}


def __getattr__(name: str) -> Any:
    # On demand: the other names need neither torch nor the seconds of its import.
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_WITH_TORCH[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
