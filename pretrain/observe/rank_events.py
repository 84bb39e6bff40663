"""Events of ranks and of the health of a run: faults, slow and stuck ranks, GPUs, divergence,
corruption.

See :mod:`pretrain.observe.events` for the rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from pretrain.observe.event import Event
from pretrain.observe.metric import Metric, measured, metric

HEALTH_RULES = ("loss_spike", "grad_norm_spike", "slow_divergence", "router_collapse")
"""Rules of ``[health]`` about numbers that are finite."""
_ACTIONS = (
    "report", "lower_lr", "stop", "skip", "go_back", "skip+lower_lr", "go_back+lower_lr",
)  # fmt: skip
_SPEED = Metric("convoy_straggler_speed_ratio", "gauge", "ratio",
    "Speed of a slow rank over that of the others.", ("rank",), "absent for other ranks",
)  # fmt: skip
_STUCK = Metric(
    "convoy_stuck_ranks", "gauge", "ranks", "Ranks that are reported as stuck now.", how="add",
    begin=0.0)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class HealthSignal(Event):
    """A rule of ``[health]`` saw something in the step after ``step``."""

    name: ClassVar[str] = "health_signal"
    rule: str = metric(
        "convoy_health_signals_total", "counter", "signals", "Signals of the playbook.",
        labels=("rule",), label_values=("not_finite", *HEALTH_RULES),
        note="see the [playbook](operations.md#divergence)")  # fmt: skip
    """``not_finite``, ``loss_spike``, ``grad_norm_spike``, ``slow_divergence`` or
    ``router_collapse``."""
    observed: float
    usual: float
    """What the history lets expect."""
    limit: float
    """The threshold that ``observed`` has passed."""
    text: str
    """The signal for people."""


@dataclass(frozen=True, kw_only=True)
class HealthAction(Event):
    """What is done about the signal of the step after ``step``; published before it is done."""

    name: ClassVar[str] = "health_action"
    rule: str
    action: str = metric(
        "convoy_health_actions_total", "counter", "actions", "Actions of the playbook.",
        labels=("action",), label_values=_ACTIONS)  # fmt: skip
    """``report``, ``lower_lr``, ``skip``, ``go_back``, ``skip+lower_lr``, ``go_back+lower_lr`` or
    ``stop``."""
    occurrence: int
    """How many times the rule had a signal within 500 steps."""
    to_step: int | None = None
    """The step that the run goes back to."""
    skipped_samples: tuple[int, int] | None = None
    """The samples that are left out from now on, from the first index up to, and without, the
    second."""
    lr_factor: float | None = None
    """What the learning rate is multiplied by, where the action lowers it."""
    lr_until_step: int | None = None
    """The last step with the lower learning rate."""
    text: str
    """The action for people."""


@dataclass(frozen=True, kw_only=True)
class FaultInjected(Event):
    """A fault of ``[[inject]]`` is about to happen in the step after ``step``."""

    name: ClassVar[str] = "fault"
    kind: str = metric("convoy_injected_faults_total", "counter", "faults", "Faults on purpose.",
        labels=("kind",), note="see [faults on purpose](operations.md#faults-on-purpose)",
    )  # fmt: skip
    rank: int
    text: str
    """The fault for people."""


@dataclass(frozen=True, kw_only=True)
class CapacityPlanned(Event):
    """Straggler-aware capacity has new shares, from the next step on."""

    name: ClassVar[str] = "capacity_plan"
    plans: list[list[int]]
    """Units of each rank, for each expert group."""
    relative_speeds: list[float] = field(default_factory=list)
    """Of each rank, over the mean of its expert group."""


@dataclass(frozen=True, kw_only=True)
class StragglerFound(Event):
    """A rank is slow as a whole; stage 3 asks for its replacement."""

    name: ClassVar[str] = "straggler"
    rank: int
    speed: float = measured(replace(_SPEED, value=lambda event: {event.rank: event.speed}))
    """Over the median speed of the other ranks of its pipeline stage."""
    z: float
    """How many standard errors the change of speed was."""
    since_step: int
    """The first slow step."""
    stage: int
    """The answer. 0: none; 1: fewer assignments to the rank's experts; 2: fewer micro-batches; 3:
    the rank is still slow after ``stragglers.patience_steps``, and should be replaced."""
    action: str = ""
    """The answer, for people."""


@dataclass(frozen=True, kw_only=True)
class StragglerEnded(Event):
    """A slow rank is as fast as the others again."""

    name: ClassVar[str] = "straggler_ended"
    rank: int = measured(replace(_SPEED, value=lambda event: {event.rank: None}))
    speed: float
    """While the rank was slow."""
    since_step: int


@dataclass(frozen=True, kw_only=True)
class MicroBatchesPlanned(Event):
    """The micro-batches of a step are divided anew among ranks, from the next step on."""

    name: ClassVar[str] = "micro_batch_plan"
    counts: list[int]
    """Of each data-parallel rank, in the next step."""
    relative_speeds: list[float] = field(default_factory=list)
    """Of each data-parallel rank; an ordinary rank has 1."""
    predicted_gain: float = 0.0
    """The part of the step's time that this division should save over equal parts."""


@dataclass(frozen=True, kw_only=True)
class StragglerGain(Event):
    """What an answer to a slow rank has changed: medians of 8 steps before it and after it."""

    name: ClassVar[str] = "straggler_gain"
    stage: int
    """As in ``straggler``."""
    seconds_before: float
    """Of the slowest rank, in one step."""
    seconds_after: float
    kept: bool = True
    """False where steps became longer: micro-batches are divided equally again."""


@dataclass(frozen=True, kw_only=True)
class Verified(Event):
    """A check of ``[verify]`` found no silent data corruption."""

    name: ClassVar[str] = "verified"
    kind: str = metric("convoy_verifications_total", "counter", "checks",
        "Checks that found no silent data corruption.", labels=("kind",),
        note="of `[verify]`; `kind` is `parameters` or `gradients`")  # fmt: skip
    """``parameters``: parameters and moments of all replicas are equal. ``gradients``: gradients
    of the step after ``step`` are equal when they are computed again."""
    seconds: float = metric("convoy_verify_seconds_total", "counter", "seconds",
        "Seconds that training waited for these checks.", labels=("kind",),
        value=lambda event: {event.kind: event.seconds}, note="outside of steps")  # fmt: skip
    """What training waited for the check, on rank 0."""


@dataclass(frozen=True, kw_only=True)
class Digested(Event):
    """Digests of a committed step with ``train.exact``: 64 bits each, as 16 hexadecimal digits, and
    equal on every layout.

    A tensor is in two of them: by its layer, and by its name within the layer.
    """

    name: ClassVar[str] = "digest"
    gradient_layers: dict[str, str]
    """Of the summed gradients, before clipping."""
    gradient_tensors: dict[str, str]
    parameter_layers: dict[str, str]
    """Of the parameters after the update."""
    parameter_tensors: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CorruptionFound(Event):
    """A check of ``[verify]`` found numbers that must be equal and are not."""

    name: ClassVar[str] = "corruption"
    kind: str = metric("convoy_corruptions_total", "counter", "checks",
        "Checks that found silent data corruption.", labels=("kind",),
        label_values=("parameters", "gradients"))  # fmt: skip
    """``parameters`` or ``gradients``."""
    ranks: list[int]
    """Ranks whose numbers may be wrong."""
    machines: list[str]
    """Their machines."""
    certain: bool
    """Whether it is known that exactly these ranks have wrong numbers."""
    excluded: str | None = None
    """The machine that was put on the exclude list."""
    stops: bool = True
    """Whether the run ends."""
    to_step: int | None = None
    """The step after which the next start begins, where the run ends and such a checkpoint is
    left."""
    text: str
    """The finding for people."""


@dataclass(frozen=True, kw_only=True)
class RankStuck(Event):
    """Ranks have not moved for longer than their history lets expect, and others wait for them."""

    name: ClassVar[str] = "rank_stuck"
    ranks: list[int] = measured(replace(_STUCK, value=lambda event: len(event.ranks)))
    phase: str
    """``data``, ``forward_backward``, ``barrier``, ``optimizer``, ``save``, ``evaluate``,
    ``finish``, or ``start`` before the first step."""
    seconds: float
    """For which the ranks have not moved, or have published no heartbeat."""
    limit_seconds: float
    """From which on the ranks count as stuck."""
    has_heartbeat: bool
    """False: the process is stopped or lost."""
    place: str = ""
    """The collective or the source line, for people."""
    ends_run: bool = False
    """Whether ``detection.end_stuck_run`` ends the run now."""
    text: str = ""
    """All of it, for people."""


@dataclass(frozen=True, kw_only=True)
class RankMoves(Event):
    """Ranks that were reported as stuck move again."""

    name: ClassVar[str] = "rank_moves"
    ranks: list[int] = measured(replace(_STUCK, value=lambda event: -len(event.ranks)))


@dataclass(frozen=True, kw_only=True)
class RankLossOdd(Event):
    """The loss of a rank differs from that of other ranks by more than chance explains."""

    name: ClassVar[str] = "rank_loss_odd"
    rank: int
    loss: float
    """Of the rank in the last step, in nats per token."""
    usual_loss: float
    """The median over ranks in the last step."""
    z: float
    """The difference, in standard deviations (one step) or standard errors (more steps)."""
    steps: int
    """Over which the difference was seen."""


@dataclass(frozen=True, kw_only=True)
class RankLost(Event):
    """A collective of this rank failed because another rank is lost or stuck."""

    name: ClassVar[str] = "rank_lost"
    waited_seconds: float
    """What this rank waited in the collective; 0 where the collective failed at once."""


@dataclass(frozen=True, kw_only=True)
class DeviceProblem(Event):
    """NVML reports a problem of the GPU of a rank."""

    name: ClassVar[str] = "device_problem"
    rank: int
    device: str
    """The GPU's UUID."""
    text: str
    """The problem for people: an Xid error, uncorrected ECC errors, or a slowdown."""


@dataclass(frozen=True, kw_only=True)
class DevicesSampled(Event):
    """What NVML says of all GPUs, once in a minute."""

    name: ClassVar[str] = "devices"
    utilization_min: float | None = None
    """Share of time with a running kernel, of the GPU with the least."""
    utilization_mean: float | None = None
    memory_bytes_max: int | None = None
    """Used, of the GPU with the most."""
    temperature_max: float | None = None
    """In degrees Celsius."""
    energy_joules: float | None = None
    """That all GPUs have used since the start of the ranks' processes."""
    utilization_of_rank: Mapping[int, float] = metric(
        "convoy_gpu_utilization_ratio", "gauge", "ratio",
        "Share of time in which the GPU of a rank ran kernels.", labels=("rank",),
        log=False, default_factory=dict, note="by NVML")  # fmt: skip
    memory_bytes_of_rank: Mapping[int, int] = metric(
        "convoy_gpu_memory_bytes", "gauge", "bytes", "Used memory of the GPU of a rank.",
        labels=("rank",), log=False, default_factory=dict, note="by NVML")  # fmt: skip
    energy_joules_of_rank: Mapping[int, float] = metric(
        "convoy_gpu_energy_joules_total", "counter", "joules",
        "Energy that the GPU of a rank used in this start.", labels=("rank",), how="total",
        log=False, default_factory=dict, note="by NVML; absent for GPUs that do not count it",
    )  # fmt: skip
