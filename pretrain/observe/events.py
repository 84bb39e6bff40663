"""What happens in a run, as values.

An event is published once, by the code in which it happens. Sinks (the JSONL log, the Prometheus
metrics, the console, tests) subscribe; the code that publishes knows none of them. Every rank
publishes; sinks that are for a whole run are subscribed on rank 0 only.

The fields of the classes below are the schema of ``RUN_DIR/log.jsonl``, and say which metrics there
are (:mod:`pretrain.observe.metric`). A field whose metadata has
``log`` false is for other sinks. Adding an event or a field with a default keeps ``LOG_VERSION``;
removing or renaming one raises it, and :mod:`pretrain.observe.jsonl` upgrades older lines.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pretrain.observe.checkpoint_events import (
    CheckpointCommitted,
    CheckpointFailed,
    Restored,
    SaveBegun,
    SaveIntervalChosen,
)
from pretrain.observe.data_events import DataFetched, DataOpened
from pretrain.observe.event import Event, Notice
from pretrain.observe.metric import Metric, measured, metric
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
from pretrain.observe.step_events import (
    STEP,
    Evaluated,
    IntervalEnded,
    Moved,
    StepCommitted,
    StepSkipped,
)

_EPOCH = Metric("convoy_topology_epoch", "gauge", "resumes",
    "Times that the run has resumed with another layout.", begin=0.0, former=True)  # fmt: skip
LOG_VERSION = 1
"""Of the log; see above for what changes it."""


@dataclass(frozen=True, kw_only=True)
class Launched(Event):
    """A start of the run has opened the log; its values are not restored yet."""

    name: ClassVar[str] = "launch"
    process_start: float = metric("convoy_start_timestamp_seconds", "gauge", "seconds",
        "Unix time at which the process of rank 0 was started.", begin=0.0)  # fmt: skip
    """Unix time at which the process of rank 0 was started."""
    launch_id: str = ""
    world_size: int = 1
    start_seconds: dict[str, float] = field(default_factory=dict)
    """Of the parts of the start so far, see ``RunStarted``."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Ranks, model and data are ready; training begins or resumes after ``step``."""

    name: ClassVar[str] = "start"
    step: int = measured(replace(STEP, former=False))
    log_version: int = LOG_VERSION
    job: str = ""
    """The spec's ``name``."""
    spec_hash: str = ""
    world_size: int = metric(
        "convoy_ranks", "gauge", "ranks", "Ranks that train, by the state of this start.", begin=0.0
    )  # fmt: skip
    topology: dict[str, int]
    """Degrees of the parallel axes."""
    layout: str = ""
    """The degrees for people."""
    parameters: int
    """Of the whole model."""
    steps: int = 0
    """Steps that the spec asks for."""
    step_tokens: int = 0
    """Target tokens of a step with the full global batch."""
    device: str = ""
    launch_id: str
    metrics_url: str | None = None
    topology_epoch: int = measured(replace(_EPOCH, former=False), default=0)
    """How many times the run has resumed with another layout."""
    spares: int = 0
    """Ranks that stand by."""
    layout_reason: str = ""
    """What ``elastic.enabled`` changed of the layout of ``[parallel]``."""
    start_seconds: dict[str, float] = field(default_factory=dict)
    """From the start of the process of rank 0 to this event, by part, in order: ``imports``,
    ``rendezvous``, ``corpus``, ``build``, ``writer``, ``load``, ``staging``."""
    record: dict[str, str] = field(default_factory=dict)
    """What the run is made with: ``run_id``, ``corpus``, ``code``, versions, host and device."""
    spec: dict[str, Any] = field(default_factory=dict)
    """The resolved spec."""


@dataclass(frozen=True, kw_only=True)
class Resized(Event):
    """The run resumes with another layout than that of the checkpoint."""

    name: ClassVar[str] = "resized"
    epoch: int = measured(_EPOCH)
    """How many times the run has resumed with another layout, this time counted."""
    before: dict[str, int]
    """Degrees of the parallel axes of the checkpoint."""
    after: dict[str, int]
    """Degrees of the parallel axes from this step on."""
    save_id: str
    """Of the checkpoint, which is the parent of the new epoch."""


@dataclass(frozen=True, kw_only=True)
class Regrouped(Event):
    """Replicas have left or come, while the others went on."""

    name: ClassVar[str] = "regrouped"
    epoch: int
    """Counts the changes of this launch; the first epoch is 1."""
    left: list[dict[str, Any]]
    """The replicas that are gone: ``replica``, its seat in the launch, ``start``, how often its
    processes were started before, and ``why``."""
    joined: list[int]
    """The seats of the replicas that got the run's state."""
    replicas: int = metric(
        "convoy_replicas", "gauge", "replicas", "Replicas of the model that train.",
        note="only where replicas have left or come")  # fmt: skip
    """From this step on."""
    world_size: int
    topology: dict[str, int]
    """Degrees of the parallel axes from this step on."""
    seconds: float = metric(
        "convoy_regroup_seconds_total", "counter", "seconds",
        "Seconds in which no step was taken because replicas left or came.")  # fmt: skip
    """From the end of the epoch before, as this rank met it, to here."""


@dataclass(frozen=True, kw_only=True)
class SpecChanged(Event):
    """A field of the spec differs from the checkpoint that the run resumes from."""

    name: ClassVar[str] = "spec_changed"
    field: str
    before: Any
    now: Any


@dataclass(frozen=True, kw_only=True)
class RunStopped(Event):
    """The run was asked to stop, and committed a checkpoint."""

    name: ClassVar[str] = "stopped"
    cause: str = ""
    """``signal``, ``notice_file`` or ``time_limit``."""


@dataclass(frozen=True, kw_only=True)
class RunFailed(Event):
    """An error ends this start."""

    name: ClassVar[str] = "failed"
    state: str
    """``lost_rank``, ``health``, ``bad_input``, ``interrupted`` or ``crashed``."""
    reason: str
    """One line for people."""


@dataclass(frozen=True, kw_only=True)
class LedgerSummed(Event):
    """The goodput ledger up to the line before, over all starts of the run."""

    name: ClassVar[str] = "ledger"
    wall_seconds: float
    """Since the start of the run's first process."""
    goodput: float | None = measured(
        Metric("convoy_goodput_ratio", "gauge", "ratio",
               "Share of productive time in the wall time that the run was not idle.",
               scope="ledger", note="see the [ledger](#the-goodput-ledger)"),
        Metric(unit="ratio", tracker="speed/goodput"))  # fmt: skip
    """Share of ``productive`` in the wall time without ``idle``."""
    step_share: float | None
    """Share of ``productive``, ``data_wait`` and ``communication_exposed`` together."""
    seconds: dict[str, float] = metric(
        "convoy_phase_seconds_total", "counter", "seconds", "Wall time of the run by phase.",
        labels=("phase",), scope="ledger", note="over all starts")  # fmt: skip
    """By phase; phases without time are left out."""
    lost_seconds: dict[str, float] = metric(
        "convoy_lost_seconds_total", "counter", "seconds", "Wall time that was not productive.",
        labels=("cause",), scope="ledger", note="and not `idle`, by cause, over all starts",
    )  # fmt: skip
    """By cause; causes without time are left out."""
    restarts: dict[str, int] = metric(
        "convoy_restarts_total", "counter", "starts", "Starts after the first.",
        labels=("cause",), scope="ledger", note="by how the start before ended")  # fmt: skip
    """By how the start before ended."""
    rank_seconds: float = 0.0
    """Wall time without ``idle`` times the ranks that the run had then, spares counted."""
    last_start: dict[str, float] = field(default_factory=dict)
    """Seconds of the parts of the newest start, with ``first_step``."""


@dataclass(frozen=True, kw_only=True)
class RunDone(Event):
    """The run took all of its steps."""

    name: ClassVar[str] = "done"


EVENTS: dict[str, type[Event]] = {
    kind.name: kind
    for kind in (
        RunStarted, Restored, Regrouped, Resized, SpecChanged, DataOpened, Notice, StepCommitted,
        StepSkipped, CapacityPlanned, IntervalEnded, Evaluated, SaveBegun, SaveIntervalChosen,
        CheckpointCommitted, CheckpointFailed, RunStopped, RunDone, StragglerFound,
        StragglerEnded, MicroBatchesPlanned, StragglerGain, HealthSignal, HealthAction,
        FaultInjected, Launched, RankLost, RunFailed, LedgerSummed, Verified, CorruptionFound,
        RankStuck, RankMoves, RankLossOdd, DeviceProblem, DevicesSampled, DataFetched,
        Digested, Moved,
    )
}  # fmt: skip
"""Every event by its name in the log."""
