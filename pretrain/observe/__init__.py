"""What people and machines see of a run: events, console, log and metrics."""

from typing import TYPE_CHECKING

from parallel.on_demand import on_demand
from pretrain.observe.console import Console, complain, human_bytes, progress_bar, say
from pretrain.observe.events import (
    CapacityPlanned,
    CheckpointCommitted,
    CheckpointFailed,
    Evaluated,
    Events,
    IntervalEnded,
    Notice,
    RankLossOdd,
    RankMoves,
    RankStuck,
    Resized,
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
from pretrain.observe.jsonl import History, JsonlLog, last_step, read_log

if TYPE_CHECKING:
    from pretrain.observe.prometheus import Endpoint, Metrics
    from pretrain.observe.status import (
        Status,
        StatusFile,
        newest_checkpoint,
        outcome_of,
        read_status,
    )
    from pretrain.observe.summary import Summary, show_summary

__all__ = [
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
    "RankLossOdd",
    "RankMoves",
    "RankStuck",
    "Resized",
    "Restored",
    "RoutingReport",
    "RunDone",
    "RunStarted",
    "RunStopped",
    "SaveBegun",
    "SaveIntervalChosen",
    "SpecChanged",
    "Status",
    "StatusFile",
    "StepCommitted",
    "StepSkipped",
    "Summary",
    "complain",
    "human_bytes",
    "last_step",
    "newest_checkpoint",
    "outcome_of",
    "progress_bar",
    "read_log",
    "read_status",
    "say",
    "show_summary",
]


# On demand: the other names need neither torch nor pydantic, and the time of their import.
__getattr__ = on_demand(
    __name__,
    {
        "Endpoint": "pretrain.observe.prometheus",
        "Metrics": "pretrain.observe.prometheus",
        "Status": "pretrain.observe.status",
        "StatusFile": "pretrain.observe.status",
        "Summary": "pretrain.observe.summary",
        "newest_checkpoint": "pretrain.observe.status",
        "outcome_of": "pretrain.observe.status",
        "read_status": "pretrain.observe.status",
        "show_summary": "pretrain.observe.summary",
    },
)


def __dir__() -> list[str]:
    return __all__
