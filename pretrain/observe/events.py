"""What happens in a run, as values.

An event is published once, by the code in which it happens. Sinks (the JSONL log, the Prometheus
metrics, the console, tests) subscribe; the code that publishes knows none of them. Every rank
publishes; sinks that are for a whole run are subscribed on rank 0 only.

The fields of the classes below are the schema of ``RUN_DIR/log.jsonl``. A field whose metadata has
``log`` false is for other sinks. Adding an event or a field with a default keeps ``LOG_VERSION``;
removing or renaming one raises it, and :mod:`pretrain.observe.jsonl` upgrades older lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pretrain.observe.checkpoint_events import (
    CheckpointCommitted,
    CheckpointFailed,
    Restored,
    SaveBegun,
    SaveIntervalChosen,
)
from pretrain.observe.data_events import DataFetched, DataOpened
from pretrain.observe.event import Event
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

LOG_VERSION = 1
"""Of the log; see above for what changes it."""


@dataclass(frozen=True, kw_only=True)
class Launched(Event):
    """A start of the run has opened the log; its values are not restored yet."""

    name: ClassVar[str] = "launch"
    process_start: float
    """Unix time at which the process of rank 0 was started."""
    launch_id: str = ""
    world_size: int = 1
    start_seconds: dict[str, float] = field(default_factory=dict)
    """Of the parts of the start so far, see ``RunStarted``."""


@dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """Ranks, model and data are ready; training begins or resumes after ``step``."""

    name: ClassVar[str] = "start"
    log_version: int = LOG_VERSION
    job: str = ""
    """The spec's ``name``."""
    spec_hash: str = ""
    world_size: int
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
    topology_epoch: int = 0
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
    epoch: int
    """How many times the run has resumed with another layout, this time counted."""
    before: dict[str, int]
    """Degrees of the parallel axes of the checkpoint."""
    after: dict[str, int]
    """Degrees of the parallel axes from this step on."""
    save_id: str
    """Of the checkpoint, which is the parent of the new epoch."""


@dataclass(frozen=True, kw_only=True)
class SpecChanged(Event):
    """A field of the spec differs from the checkpoint that the run resumes from."""

    name: ClassVar[str] = "spec_changed"
    field: str
    before: Any
    now: Any


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """One line for people, of something that has no event of its own."""

    name: ClassVar[str] = "notice"
    text: str
    problem: bool = False
    """Whether somebody should look at the matter."""


@dataclass(frozen=True, kw_only=True)
class StepTaken(Event):
    """What committed and skipped steps share."""

    loss: float
    """Mean loss over the target tokens of the step, in nats per token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    seconds: float
    """Wall time on rank 0, with barrier and update."""
    data_wait_seconds: float = 0.0
    """Time that the slowest rank waited for its batch."""
    rank_0_data_wait_seconds: float | None = None
    """Time that rank 0 waited for its batch."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None but in float16."""
    collective_seconds: Mapping[tuple[str, str], float] = field(
        default_factory=dict, metadata={"log": False}
    )
    """Of this rank, by (operation, parallelism)."""
    collective_bytes: Mapping[tuple[str, str], int] = field(
        default_factory=dict, metadata={"log": False}
    )


@dataclass(frozen=True, kw_only=True)
class StepCommitted(StepTaken):
    """The state moved forward by one step."""

    name: ClassVar[str] = "step"
    lr: float
    target_tokens: int = 0
    """Of this step, over all ranks."""
    tokens_seen: int
    """Target tokens of all committed steps."""
    consumed_samples: int
    """The index of the next sample: sequences of all committed steps, and those left out."""
    samples: int | None = None
    """Sequences of this step, over all ranks."""
    data_checksum: int | None = None
    """The sum over the sequences of this step of the CRC-32 of their tokens as int64."""
    slowest_rank_seconds: float
    """Time of the slowest rank from its batch to the barrier."""
    tokens_per_second: float
    mfu: float
    """Model FLOPs utilization (Chowdhery et al., arXiv 2204.02311, appendix B)."""
    model_flops: float = 0.0
    """FLOPs of the model's GEMMs in this step, forward and backward."""
    communication_seconds: dict[str, float] = field(default_factory=dict)
    """Of rank 0, by parallelism (dp, ep, tp, cp, pp, world)."""
    exposed_seconds: dict[str, float] = field(default_factory=dict)
    """The part of ``communication_seconds`` that no computation hid."""
    communication_bytes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StepSkipped(StepTaken):
    """A step changed nothing: loss, gradient or router logits were not finite, or a rule of
    ``[health]`` asked for it."""

    name: ClassVar[str] = "skip"
    reason: str
    """``not_finite``, ``overflow``, ``router_not_finite``, or the rule of ``[health]``."""
    why: str = ""
    """The reason for people."""
    overflow: bool = False
    """Whether a float16 gradient overflowed, which halves the loss scale and is expected."""
    bad_router: tuple[int, int] | None = None
    """(layer, rank) of the first router whose logits are not finite."""
    skipped_samples: tuple[int, int] | None = None
    """The samples from the first index up to, and without, the second were left out; None where the
    step is tried again with the samples that it had."""


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """What the routers did in a log interval, over all ranks; lists have an entry a MoE layer."""

    layers: list[int]
    """Numbers of the MoE layers."""
    tokens_per_expert: list[list[int]]
    """Assignments of each expert."""
    entropies: list[float]
    """Mean entropy of a token's probabilities, in nats."""
    dropped: list[int]
    """Assignments that no expert had room for."""
    rerouted: list[int]
    """Assignments that took another expert than the router's choice."""
    aux_losses: dict[str, list[float]]
    """Mean auxiliary losses of a token, without their coefficients, by ``load_balance``,
    ``sequence_balance`` and ``z``."""
    aux_loss: float
    """What the auxiliary losses of all layers added to the model's loss, in the mean."""
    bias_abs_max: float | None
    """Largest bias of an expert in magnitude; None without biases."""
    rank_imbalance: float
    """Largest over mean number of routed tokens that a rank's experts computed."""


@dataclass(frozen=True, kw_only=True)
class IntervalEnded(Event):
    """``train.log_interval_steps`` steps have passed; sums and means over the interval."""

    name: ClassVar[str] = "interval"
    loss: float
    """Of the interval's last step, as ``lr`` and ``grad_norm`` are."""
    lr: float
    grad_norm: float
    tokens_per_second: float
    mfu: float
    seconds: float
    """Of the interval's committed steps."""
    tokens_seen: int = 0
    """Target tokens of all committed steps of the run."""
    aux_loss: float | None = None
    """What auxiliary losses added to ``loss`` for the gradient: with their coefficients, summed
    over layers; None without MoE layers."""
    aux_losses: dict[str, float] = field(default_factory=dict)
    """Means over tokens and layers without coefficients: ``load_balance``, ``sequence_balance``
    and ``z``, each where its coefficient is above 0."""
    mtp_losses: list[float] | None = None
    """Mean loss in nats of each layer of multi-token prediction over its targets in the interval,
    without its weight; None without such layers. ``loss`` has none of it."""
    padding: float | None = None
    """Share of the positions of sequences that have no target; None where all have one."""
    source_tokens: dict[str, int] = field(default_factory=dict)
    """Positions of the sequences drawn from each source by its name, where there are several."""
    peak_memory_bytes: int | None = None
    """Of the rank that has had most since its start: allocated on its GPU, or else resident."""
    communication_seconds: dict[str, float]
    """Mean over ranks, by parallelism."""
    exposed_seconds: dict[str, float]
    """The part of ``communication_seconds`` that no computation hid."""
    bubble: float | None = None
    """Share of the interval in which pipeline stages waited for each other."""
    bubble_formula: float | None = None
    """The bubble that the schedule has when all stages take equal time."""
    load_imbalance: float | None = None
    """Largest over mean load of an expert, in the layer with the largest."""
    router_entropy: float | None = None
    """The smallest mean entropy of a layer, in nats."""
    dropped: int | None = None
    rerouted: int | None = None
    layer_imbalances: list[float] | None = None
    """Largest over mean load of an expert, of each MoE layer."""
    rank_seconds: list[float] | None = None
    """Of each rank, in the mean step: from its batch to the barrier, without waits in collectives.
    None with more than 256 ranks."""
    float8_underflow: dict[str, float] = field(default_factory=dict)
    """Of the numbers that are not 0, the share that became 0 in float8 in the backward of the
    interval's last step, by part and operand, as ``experts.gradients``."""
    float8_overflow: dict[str, int] = field(default_factory=dict)
    """Tiles and blocks with a NaN or an infinity in the backwards of the interval, those of skipped
    steps counted, by part and operand."""
    routing: RoutingReport | None = field(default=None, metadata={"log": False})
    capacity_shares: list[float] | None = field(default=None, metadata={"log": False})
    relative_speeds: list[float] | None = field(default=None, metadata={"log": False})


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Held-out sequences were scored."""

    name: ClassVar[str] = "eval"
    loss: float
    """Mean loss in nats per token."""
    bits_per_byte: float
    whole: bool = False
    """Whether all held-out sequences were scored."""
    bits_per_byte_by_set: dict[str, float] = field(default_factory=dict)
    """Of each source and validation set by itself, where there are several."""


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
    goodput: float | None
    """Share of ``productive`` in the wall time without ``idle``."""
    step_share: float | None
    """Share of ``productive``, ``data_wait`` and ``communication_exposed`` together."""
    seconds: dict[str, float]
    """By phase; phases without time are left out."""
    lost_seconds: dict[str, float]
    """By cause; causes without time are left out."""
    restarts: dict[str, int]
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
        RunStarted, Restored, Resized, SpecChanged, DataOpened, Notice, StepCommitted, StepSkipped,
        CapacityPlanned, IntervalEnded, Evaluated, SaveBegun, SaveIntervalChosen,
        CheckpointCommitted, CheckpointFailed, RunStopped, RunDone, StragglerFound,
        StragglerEnded, MicroBatchesPlanned, StragglerGain, HealthSignal, HealthAction,
        FaultInjected, Launched, RankLost, RunFailed, LedgerSummed, Verified, CorruptionFound,
        RankStuck, RankMoves, RankLossOdd, DeviceProblem, DevicesSampled, DataFetched,
        Digested,
    )
}  # fmt: skip
"""Every event by its name in the log."""
