"""What people and machines see of a run: events, console, log and metrics."""

from typing import TYPE_CHECKING

from parallel.on_demand import on_demand
from pretrain.observe.checkpoint_events import (
    CheckpointCommitted,
    CheckpointFailed,
    Restored,
    SaveBegun,
    SaveIntervalChosen,
)
from pretrain.observe.console import Console, complain, human_bytes, progress_bar, say
from pretrain.observe.data_events import DataFetched, DataOpened
from pretrain.observe.event import Event, Events
from pretrain.observe.events import (
    Evaluated,
    IntervalEnded,
    Launched,
    LedgerSummed,
    Notice,
    Resized,
    RoutingReport,
    RunDone,
    RunFailed,
    RunStarted,
    RunStopped,
    SpecChanged,
    StepCommitted,
    StepSkipped,
)
from pretrain.observe.jsonl import (
    History,
    JsonlLog,
    LoggedEvent,
    last_event,
    last_step,
    read_former,
    read_log,
)
from pretrain.observe.ledger import Ledger, ledger_of, ledger_table, summed
from pretrain.observe.live_ledger import LiveLedger
from pretrain.observe.rank_events import (
    CapacityPlanned,
    CorruptionFound,
    DeviceProblem,
    DevicesSampled,
    Digested,
    FaultInjected,
    HealthAction,
    HealthSignal,
    MicroBatchesPlanned,
    RankLossOdd,
    RankLost,
    RankMoves,
    RankStuck,
    StragglerEnded,
    StragglerFound,
    StragglerGain,
    Verified,
)

if TYPE_CHECKING:
    from pretrain.observe.endpoint import Endpoint, local_port
    from pretrain.observe.environment import code_version, experiment_record
    from pretrain.observe.live import LiveConsole, on_terminal
    from pretrain.observe.prometheus import Metrics
    from pretrain.observe.rank_metrics import RankMetrics
    from pretrain.observe.status import (
        Status,
        StatusFile,
        newest_checkpoint,
        outcome_of,
        read_status,
    )
    from pretrain.observe.summary import Summary, show_summary
    from pretrain.observe.trackers import open_trackers

__all__ = [
    "CapacityPlanned",
    "CheckpointCommitted",
    "CheckpointFailed",
    "Console",
    "CorruptionFound",
    "DataFetched",
    "DataOpened",
    "DeviceProblem",
    "DevicesSampled",
    "Digested",
    "Endpoint",
    "Evaluated",
    "Event",
    "Events",
    "FaultInjected",
    "HealthAction",
    "HealthSignal",
    "History",
    "IntervalEnded",
    "JsonlLog",
    "Launched",
    "Ledger",
    "LedgerSummed",
    "LiveConsole",
    "LiveLedger",
    "LoggedEvent",
    "Metrics",
    "MicroBatchesPlanned",
    "Notice",
    "RankLossOdd",
    "RankLost",
    "RankMetrics",
    "RankMoves",
    "RankStuck",
    "Resized",
    "Restored",
    "RoutingReport",
    "RunDone",
    "RunFailed",
    "RunStarted",
    "RunStopped",
    "SaveBegun",
    "SaveIntervalChosen",
    "SpecChanged",
    "Status",
    "StatusFile",
    "StepCommitted",
    "StepSkipped",
    "StragglerEnded",
    "StragglerFound",
    "StragglerGain",
    "Summary",
    "Verified",
    "code_version",
    "complain",
    "experiment_record",
    "human_bytes",
    "last_event",
    "last_step",
    "ledger_of",
    "ledger_table",
    "local_port",
    "newest_checkpoint",
    "on_terminal",
    "open_trackers",
    "outcome_of",
    "progress_bar",
    "read_former",
    "read_log",
    "read_status",
    "say",
    "show_summary",
    "summed",
]


# On demand: the other names need neither torch nor pydantic, and the time of their import.
__getattr__ = on_demand(
    __name__,
    {
        "Endpoint": "pretrain.observe.endpoint",
        "LiveConsole": "pretrain.observe.live",
        "Metrics": "pretrain.observe.prometheus",
        "RankMetrics": "pretrain.observe.rank_metrics",
        "Status": "pretrain.observe.status",
        "StatusFile": "pretrain.observe.status",
        "Summary": "pretrain.observe.summary",
        "local_port": "pretrain.observe.endpoint",
        "code_version": "pretrain.observe.environment",
        "experiment_record": "pretrain.observe.environment",
        "open_trackers": "pretrain.observe.trackers",
        "on_terminal": "pretrain.observe.live",
        "newest_checkpoint": "pretrain.observe.status",
        "outcome_of": "pretrain.observe.status",
        "read_status": "pretrain.observe.status",
        "show_summary": "pretrain.observe.summary",
    },
)


def __dir__() -> list[str]:
    return __all__
