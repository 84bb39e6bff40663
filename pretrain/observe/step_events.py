"""Events of steps: committed, skipped, summed over a log interval, and scored.

See :mod:`pretrain.observe.events` for the rules, and :mod:`pretrain.observe.metric` for what the
fields say of metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pretrain.observe.event import Event
from pretrain.observe.metric import Metric, inside, measured, metric
from pretrain.observe.rank_events import HEALTH_RULES

SHOWN = {"world": "sync"}
"""Purposes of collectives by other names for people: those of all ranks are the step barrier's."""
STEP = Metric(
    "convoy_step", "gauge", "steps", "Committed steps of the run, over all starts.", begin=0.0,
    former=True)  # fmt: skip


def _once(event: Event) -> int:
    """The value of a counter of events."""
    return 1


@dataclass(frozen=True, kw_only=True)
class StepTaken(Event):
    """What committed and skipped steps share."""

    loss: float
    """Mean loss over the target tokens of the step, in nats per token."""
    grad_norm: float
    """Global gradient norm before clipping."""
    seconds: float = measured(
        Metric("convoy_step_duration_seconds", "histogram", "seconds",
               "Wall time of a step, with its barrier and update."),
        Metric("convoy_last_step_timestamp_seconds", "gauge", "seconds",
               "Unix time of the last step; 0 before the first.", how="time", begin=0.0,
               former=True, note="also of former starts"),
        Metric("convoy_rank_step_seconds_total", "counter", "seconds",
               "Wall time of this rank's steps, skipped ones too.", scope="rank"),
        Metric("convoy_rank_last_step_timestamp_seconds", "gauge", "seconds",
               "Unix time of this rank's last step; 0 before the first.", how="time", begin=0.0,
               scope="rank"))  # fmt: skip
    """Wall time on rank 0, with barrier and update."""
    data_wait_seconds: float = metric("convoy_data_wait_seconds_total", "counter", "seconds",
        "Time the slowest rank waited for data.", default=0.0)  # fmt: skip
    rank_0_data_wait_seconds: float | None = metric(
        "convoy_rank_data_wait_seconds_total", "counter", "seconds",
        "Time this rank waited for its batches.", scope="rank", default=None)  # fmt: skip
    """Time that rank 0 waited for its batch; in the events of another rank, its own."""
    loss_scale: float | None = None
    """What the loss was multiplied by; None but in float16."""
    collective_seconds: Mapping[tuple[str, str], float] = measured(
        Metric("convoy_collective_seconds_total", "counter", "seconds",
               "Seconds of collectives on rank 0.", ("op", "group"), note="`group` is the purpose"),
        Metric("convoy_rank_collective_seconds_total", "counter", "seconds",
               "Seconds of collectives on this rank.", ("op", "group"), scope="rank"),
        log=False, default_factory=dict)  # fmt: skip
    """Of this rank, by (operation, parallelism)."""
    collective_bytes: Mapping[tuple[str, str], int] = metric(
        "convoy_collective_bytes_total", "counter", "bytes",
        "Bytes that rank 0 gave to collectives.", labels=("op", "group"),
        log=False, default_factory=dict)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StepCommitted(StepTaken):
    """The state moved forward by one step."""

    name: ClassVar[str] = "step"
    step: int = measured(STEP,
        Metric("convoy_steps_total", "counter", "steps", "Committed steps.", value=_once),
        Metric("convoy_rank_steps_total", "counter", "steps", "Steps that this rank committed.",
               value=_once, scope="rank"))  # fmt: skip
    loss: float = metric(
        "convoy_loss", "gauge", "nats per token", "Mean loss of the last step in nats per token."
    )  # fmt: skip
    grad_norm: float = metric(
        "convoy_grad_norm", "gauge", "", "Global gradient norm of the last step, unclipped."
    )  # fmt: skip
    lr: float = metric("convoy_learning_rate", "gauge", "", "Learning rate of the last step.")
    target_tokens: int = metric(
        "convoy_tokens_total", "counter", "tokens", "Target tokens of committed steps.", default=0
    )  # fmt: skip
    """Of this step, over all ranks."""
    tokens_seen: int
    """Target tokens of all committed steps."""
    consumed_samples: int = metric("convoy_consumed_samples", "gauge", "sequences",
        "Sequences of all committed steps, and samples that were left out.",
        note="the index of the next sample")  # fmt: skip
    samples: int | None = None
    """Sequences of this step, over all ranks."""
    padding_tokens: int | None = metric("convoy_data_padding_tokens_total", "counter", "tokens",
        "Positions of committed steps that have no target.", log=False, default=None,
        note="padding of best-fit packing, and with `data.mask_boundary_labels` the first token of "
        "each document")  # fmt: skip
    data_checksum: int | None = None
    """The sum over the sequences of this step of the CRC-32 of their tokens as int64."""
    slowest_rank_seconds: float
    """Time of the slowest rank from its batch to the barrier."""
    tokens_per_second: float = metric("convoy_tokens_per_second", "gauge", "tokens per second",
        "Target tokens per second of the last step.")  # fmt: skip
    mfu: float = metric("convoy_mfu_ratio", "gauge", "ratio",
        "Model FLOPs of the last step over what its devices can do.")  # fmt: skip
    """Model FLOPs utilization (Chowdhery et al., arXiv 2204.02311, appendix B)."""
    model_flops: float = metric("convoy_model_flops_total", "counter", "FLOPs",
        "Operations that the model's products need, of committed steps.", default=0.0)  # fmt: skip
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
    reason: str = metric(
        "convoy_skipped_steps_total", "counter", "steps", "Steps that changed nothing.",
        labels=("reason",),
        label_values=("not_finite", *HEALTH_RULES, "overflow", "router_not_finite"),
        note="`not_finite`, `overflow`, `router_not_finite`, or a rule of `[health]`")  # fmt: skip
    """``not_finite``, ``overflow``, ``router_not_finite``, or the rule of ``[health]``."""
    why: str = ""
    """The reason for people."""
    overflow: bool = metric("convoy_overflows_total", "counter", "steps",
        "Steps skipped for gradients too large for float16.", default=False)  # fmt: skip
    """Whether a float16 gradient overflowed, which halves the loss scale and is expected."""
    bad_router: tuple[int, int] | None = None
    """(layer, rank) of the first router whose logits are not finite."""
    skipped_samples: tuple[int, int] | None = None
    """The samples from the first index up to, and without, the second were left out; None where the
    step is tried again with the samples that it had."""


def _by_layer(values: Callable[[RoutingReport], Sequence[float]]) -> Callable[[RoutingReport], Any]:
    """A value of a metric with the label ``layer`` out of a list with an entry a layer."""
    return lambda routing: dict(zip(routing.layers, values(routing), strict=True))


def _imbalances(routing: RoutingReport) -> list[float]:
    rows = routing.tokens_per_expert
    return [max(counts) / max(sum(counts) / len(counts), 1e-9) for counts in rows]


def _aux_loss(name: str, help: str, note: str) -> Metric:  # noqa: A002 - Prometheus' name
    return Metric(f"convoy_moe_{name}_loss", "gauge", "", f"{help}, without its coefficient.",
                  _LAYER, note, value=_by_layer(lambda r: r.aux_losses[name]))  # fmt: skip


_LAYER = ("layer",)


@dataclass(frozen=True, kw_only=True)
class RoutingReport:
    """What the routers did in a log interval, over all ranks; lists have an entry a MoE layer."""

    layers: list[int]
    """Numbers of the MoE layers."""
    tokens_per_expert: list[list[int]] = measured(
        Metric("convoy_moe_expert_load_imbalance_ratio", "gauge", "ratio",
               "Largest over mean load of an expert.", _LAYER, value=_by_layer(_imbalances)),
        Metric("convoy_moe_dead_experts", "gauge", "experts",
               "Experts without a token in a log interval.", _LAYER,
               value=_by_layer(lambda r: [counts.count(0) for counts in r.tokens_per_expert])),
    )  # fmt: skip
    """Assignments of each expert."""
    entropies: list[float] = metric("convoy_moe_router_entropy_nats", "gauge", "nats",
        "Mean entropy of a token's probabilities.", labels=_LAYER,
        value=_by_layer(lambda r: r.entropies))  # fmt: skip
    dropped: list[int] = metric("convoy_moe_dropped_tokens_total", "counter", "assignments",
        "Assignments that no expert had room for.", labels=_LAYER,
        value=_by_layer(lambda r: r.dropped))  # fmt: skip
    rerouted: list[int] = metric("convoy_moe_rerouted_tokens_total", "counter", "assignments",
        "Assignments that took another expert.", labels=_LAYER,
        value=_by_layer(lambda r: r.rerouted))  # fmt: skip
    copied: list[int] = metric("convoy_moe_copied_tokens_total", "counter", "assignments",
        "Assignments that a copy of their expert computed.", labels=_LAYER,
        value=_by_layer(lambda r: r.copied or [0] * len(r.layers)),
        default_factory=list)  # fmt: skip
    """Empty in logs of versions without copies."""
    aux_losses: dict[str, list[float]] = measured(
        _aux_loss("load_balance", "Load-balancing loss", "1 where the load is even"),
        _aux_loss("sequence_balance", "Load-balancing loss within sequences",
                  "0 where its coefficient is 0"),
        _aux_loss("z", "Loss on the size of router logits", ""))  # fmt: skip
    """Means over tokens, by ``load_balance``, ``sequence_balance`` and ``z``."""
    aux_loss: float = metric("convoy_moe_aux_loss", "gauge", "nats per token",
        "What auxiliary losses add to the model's loss, with coefficients.",
        note="mean of the last log interval")  # fmt: skip
    bias_abs_max: float | None = metric(
        "convoy_moe_router_bias_abs_max", "gauge", "", "Largest bias of an expert, in magnitude."
    )  # fmt: skip
    """None without biases."""
    rank_imbalance: float = metric("convoy_moe_rank_load_imbalance_ratio", "gauge", "ratio",
        "Largest over mean expert work of a rank.")  # fmt: skip
    """By the number of routed tokens that a rank's experts computed."""


@dataclass(frozen=True, kw_only=True)
class IntervalEnded(Event):
    """``train.log_interval_steps`` steps have passed; sums and means over the interval.

    The line of the console has the fields in their order here.
    """

    name: ClassVar[str] = "interval"
    loss: float = metric(unit="nats per token", tracker="train/loss", short="loss {:.4f}")
    """Of the interval's last step, as ``lr`` and ``grad_norm`` are."""
    aux_loss: float | None = metric(
        unit="nats per token", tracker="train/aux_loss", short="aux {:.4f}",
        live=("loss", "auxiliary {:.4f}"), default=None)  # fmt: skip
    """What auxiliary losses added to ``loss`` for the gradient: with their coefficients, summed
    over layers; None without MoE layers."""
    aux_losses: dict[str, float] = metric(tracker="moe/{}_loss", default_factory=dict)
    """Means over tokens and layers without coefficients: ``load_balance``, ``sequence_balance``
    and ``z``, each where its coefficient is above 0."""
    mtp_losses: list[float] | None = metric("convoy_mtp_loss", "gauge", "nats per token",
        "Mean loss of multi-token prediction in a log interval, in nats per token.",
        labels=("depth",), tracker="train/mtp{}_loss", short="mtp{key} {:.4f}",
        live=("loss", "mtp{key} {:.4f}"),
        value=lambda event: dict(enumerate(event.mtp_losses or (), start=1)), default=None,
        note="without its weight; `depth` 1 predicts the token after the next one; see "
        "[multi-token prediction](parallelism.md#multi-token-prediction)")  # fmt: skip
    """Of each layer of multi-token prediction over its targets; None without such layers.
    ``loss`` has none of it."""
    lr: float = metric(tracker="train/learning_rate", short="lr {:.2e}")
    grad_norm: float = metric(tracker="train/grad_norm", short="grad norm {:.2f}")
    tokens_seen: int = metric(unit="tokens", short="{:,} tokens", default=0)
    """Target tokens of all committed steps of the run."""
    tokens_per_second: float = metric(
        unit="tokens per second", tracker="speed/tokens_per_second", short="{:,.0f} tokens/s"
    )  # fmt: skip
    mfu: float = metric(unit="ratio", tracker="speed/mfu", short="MFU {:.0%}")
    seconds: float
    """Of the interval's committed steps."""
    communication_seconds: dict[str, float]
    """Mean over ranks, by parallelism."""
    exposed_seconds: dict[str, float] = metric("convoy_communication_time_ratio", "gauge", "ratio",
        "Share of a step in collectives that no computation hides.",
        tracker="speed/exposed_communication",
        short="exposed comm {:.0%} ({event.exposed_by_purpose})",
        value=lambda event: event.exposed_share, note="mean of the last log interval")  # fmt: skip
    """The part of ``communication_seconds`` that no computation hid."""
    bubble: float | None = metric(
        unit="ratio", short="bubble {:.0%} (formula {event.bubble_formula:.0%})", default=None
    )  # fmt: skip
    """Share of the interval in which pipeline stages waited for each other."""
    bubble_formula: float | None = None
    """The bubble that the schedule has when all stages take equal time; known where ``bubble``
    is."""
    load_imbalance: float | None = metric(
        unit="ratio", tracker="moe/load_imbalance", short="expert imbalance {:.2f}", default=None
    )  # fmt: skip
    """Largest over mean load of an expert, in the layer with the largest."""
    router_entropy: float | None = metric(unit="nats", tracker="moe/router_entropy", default=None)
    """The smallest mean entropy of a layer, in nats."""
    dropped: int | None = metric(
        unit="assignments", tracker="moe/dropped", short="dropped {:,.0f}", hides_zero=True,
        default=None)  # fmt: skip
    rerouted: int | None = metric(
        unit="assignments", short="rerouted {:,.0f}", hides_zero=True, default=None)  # fmt: skip
    copied: int | None = metric(
        unit="assignments", short="copied {:,.0f}", hides_zero=True, default=None)  # fmt: skip
    padding: float | None = metric(
        unit="ratio", tracker="data/padding", short="padding {:.1%}", default=None)  # fmt: skip
    """Share of the positions of sequences that have no target; None where all have one."""
    source_tokens: dict[str, int] = metric("convoy_data_source_tokens_total", "counter", "tokens",
        "Positions of sequences drawn from a source.", labels=("source",), default_factory=dict,
        note="by its name, at the end of each log interval; only with several sources")  # fmt: skip
    peak_memory_bytes: int | None = metric("convoy_peak_memory_bytes", "gauge", "bytes",
        "Peak memory of the rank that has had most.", tracker="memory/peak_bytes",
        short="memory {}", live=("memory", "{} at most on a rank"), default=None,
        note="in this start: allocated on its GPU, or else resident")  # fmt: skip
    layer_imbalances: list[float] | None = None
    """Largest over mean load of an expert, of each MoE layer."""
    load_quantiles: dict[str, float] = metric("convoy_moe_expert_load_ratio", "gauge", "ratio",
        "Load of an expert over its layer's mean: quantiles over the experts of all layers.",
        labels=("quantile",), tracker="moe/expert_load_{}", default_factory=dict,
        note="`quantile` is `p50`, `p90`, `p99` or `max`, whatever the number of experts and "
        "layers; of the last log interval")  # fmt: skip
    """By ``p50``, ``p90``, ``p99`` and ``max``; empty without MoE layers."""
    expert_loads: dict[str, list[int]] = field(default_factory=dict)
    """The load of each expert in percent of its layer's mean, by the number of the layer: of some
    layers, and of some intervals of a long run."""
    rank_seconds: list[float] | None = metric("convoy_rank_compute_seconds", "gauge", "seconds",
        "Time of a rank in the mean step of a log interval, without waits in collectives.",
        labels=("rank",), default=None,
        note="from its batch to the barrier; absent with more than 256 ranks")  # fmt: skip
    float8_underflow: dict[str, float] = metric("convoy_float8_underflow_ratio", "gauge", "ratio",
        "Share of numbers that became 0 in float8, in the last step of a log interval.",
        labels=("part", "operand"), default_factory=dict,
        note="of those that were not 0 in its backward, see [float8](layer.md#float8); `part` is "
        "`experts` or `dense`, `operand` is `inputs`, `weights` or `gradients`")  # fmt: skip
    """By part and operand, as ``experts.gradients``."""
    float8_overflow: dict[str, int] = metric(
        "convoy_float8_overflowed_tiles_total", "counter", "tiles",
        "Tiles of float8 operands with a NaN or an infinity.", labels=("part", "operand"),
        default_factory=dict)  # fmt: skip
    """Of the backwards of the interval, those of skipped steps counted, by part and operand."""
    routing: RoutingReport | None = inside(RoutingReport)
    capacity_shares: list[float] | None = metric("convoy_moe_capacity_share", "gauge", "ratio",
        "Planned expert work of a rank over its group's mean.", labels=("rank",),
        log=False, default=None, note="straggler-aware capacity only")  # fmt: skip
    relative_speeds: list[float] | None = metric(
        "convoy_rank_relative_speed_ratio", "gauge", "ratio",
        "Expert speed of a rank over its group's mean.", labels=("rank",),
        log=False, default=None, note="straggler-aware capacity only: median of its last 8 steps",
    )  # fmt: skip

    @property
    def exposed_share(self) -> float | None:
        """The share of the interval in collectives that no computation hid; None where nobody
        measured them."""
        if not self.exposed_seconds or not self.seconds:
            return None
        return sum(self.exposed_seconds.values()) / self.seconds

    @property
    def exposed_by_purpose(self) -> str:
        """``exposed_share`` of each purpose, for people."""
        shares = {purpose: t / self.seconds for purpose, t in self.exposed_seconds.items()}
        return ", ".join(f"{SHOWN.get(purpose, purpose)} {x:.0%}" for purpose, x in shares.items())


@dataclass(frozen=True, kw_only=True)
class Moved(Event):
    """What the first step of a start has moved, where ``[tune]`` says what learns."""

    name: ClassVar[str] = "moved"
    parameters: int
    """Parameters of the model, adapters among them."""
    moved_parameters: int
    """Those of which something has moved."""
    experts: int
    """Of all layers."""
    trained_experts: int
    """Those that had a gradient."""
    report: list[str]
    """Lines for people: what has not moved, and why."""


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """Held-out sequences were scored."""

    name: ClassVar[str] = "eval"
    loss: float = metric("convoy_validation_loss", "gauge", "nats per token",
        "Mean loss of held-out text at the last evaluation, in nats per token.",
        tracker="eval/loss")  # fmt: skip
    bits_per_byte: float = metric(unit="bits per byte", tracker="eval/bits_per_byte")
    whole: bool = False
    """Whether all held-out sequences were scored."""
    bits_per_byte_by_set: dict[str, float] = field(default_factory=dict)
    """Of each source and validation set by itself, where there are several."""
