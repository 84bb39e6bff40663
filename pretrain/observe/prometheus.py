"""Prometheus metrics of a run's events, the ledger and GPUs apart."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from parallel import Topology
from pretrain.observe.checkpoint_events import (
    CheckpointCommitted,
    CheckpointFailed,
    Restored,
    SaveBegun,
)
from pretrain.observe.console import HEALTH_RULES
from pretrain.observe.data_events import DataFetched
from pretrain.observe.data_metrics import DataMetrics
from pretrain.observe.device_metrics import DeviceMetrics
from pretrain.observe.event import Event
from pretrain.observe.events import (
    Evaluated,
    IntervalEnded,
    Launched,
    Resized,
    RoutingReport,
    RunStarted,
    StepCommitted,
    StepSkipped,
    StepTaken,
)
from pretrain.observe.float8_metrics import Float8Metrics
from pretrain.observe.jsonl import LoggedEvent
from pretrain.observe.ledger import Ledger, ledger_of
from pretrain.observe.ledger_metrics import LedgerMetrics
from pretrain.observe.rank_events import (
    CorruptionFound,
    DevicesSampled,
    FaultInjected,
    HealthAction,
    HealthSignal,
    RankMoves,
    RankStuck,
    StragglerEnded,
    StragglerFound,
    Verified,
)
from pretrain.spec import JobSpec


class Metrics:
    """A sink that keeps the metrics of one run in an injected registry.

    Args:
        registry: where the metrics are registered.
        spec: of the run.
        topology: the layout.
        version: of this package.
        ledger: the goodput ledger at the time of the call; None for an empty one.
        former: the lines of former starts: what a metric of them still says holds on.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        spec: JobSpec,
        topology: Topology,
        version: str,
        *,
        ledger: Callable[[], Ledger] | None = None,
        former: Sequence[LoggedEvent] = (),
    ) -> None:
        self.tokens_seen = 0
        registry.register(
            LedgerMetrics(
                ledger or (lambda: ledger_of(())),
                dollars_per_rank_hour=spec.metrics.dollars_per_rank_hour,
                tokens_seen=lambda: self.tokens_seen,
            )
        )
        self._registry, self._seq_len = registry, spec.data.seq_len
        self.devices = DeviceMetrics(registry)
        self._declare_run(spec, topology, version)
        self._declare_steps()
        self._declare_collectives_and_experts()
        self._declare_saves_and_checks()
        self._begin_at_zero()
        for line in former:
            self._remember(line.event, line.time or 0.0)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"convoy_{name}", text, labels, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"convoy_{name}", text, labels, registry=self._registry)

    def _declare_run(self, spec: JobSpec, topology: Topology, version: str) -> None:
        self._gauge("build_info", "Versions; always 1.", "version", "torch_version").labels(
            version, torch.__version__
        ).set(1)
        self._gauge("job_info", "The job; always 1.", "name", "spec_hash").labels(
            spec.name, spec.hash
        ).set(1)
        degrees = {name: str(degree) for name, degree in topology.as_dict().items()}
        self._gauge("parallelism_info", "Degrees of the parallel axes; always 1.", *degrees).labels(
            **degrees
        ).set(1)
        self.ranks = self._gauge("ranks", "Ranks that train, by the state of this start.")
        self.epoch = self._gauge(
            "topology_epoch", "Times that the run has resumed with another layout."
        )
        self.step = self._gauge("step", "Committed steps of the run, over all starts.")
        self._gauge("target_steps", "Steps that the spec asks for.").set(spec.train.steps)

    def _declare_steps(self) -> None:
        self.steps = self._counter("steps_total", "Committed steps.")
        self.tokens = self._counter("tokens_total", "Target tokens of committed steps.")
        self.step_duration = Histogram(
            "convoy_step_duration_seconds",
            "Wall time of a step, with its barrier and update.",
            buckets=[0.01 * 2**i for i in range(16)],
            registry=self._registry,
        )
        self.loss = self._gauge("loss", "Mean loss of the last step in nats per token.")
        self.mtp_loss = self._gauge(
            "mtp_loss",
            "Mean loss of multi-token prediction in a log interval, in nats per token.",
            "depth",
        )
        self.grad_norm = self._gauge(
            "grad_norm", "Global gradient norm of the last step, unclipped."
        )
        self.validation_loss = self._gauge(
            "validation_loss",
            "Mean loss of held-out text at the last evaluation, in nats per token.",
        )
        self.learning_rate = self._gauge("learning_rate", "Learning rate of the last step.")
        self.skipped = self._counter("skipped_steps_total", "Steps that changed nothing.", "reason")
        self.overflows = self._counter(
            "overflows_total", "Steps skipped for gradients too large for float16."
        )
        self.signals = self._counter("health_signals_total", "Signals of the playbook.", "rule")
        self.actions = self._counter("health_actions_total", "Actions of the playbook.", "action")
        self.faults = self._counter("injected_faults_total", "Faults on purpose.", "kind")
        self.rate = self._gauge("tokens_per_second", "Target tokens per second of the last step.")
        self.model_flops = self._counter(
            "model_flops_total", "Operations that the model's products need, of committed steps."
        )
        self.mfu = self._gauge(
            "mfu_ratio", "Model FLOPs of the last step over what its devices can do."
        )
        self.data_wait = self._counter(
            "data_wait_seconds_total", "Time the slowest rank waited for data."
        )
        self.data = DataMetrics(self._registry)
        self.float8 = Float8Metrics(self._registry)
        self.consumed = self._gauge(
            "consumed_samples", "Sequences of all committed steps, and samples that were left out."
        )
        self.padding = self._counter(
            "data_padding_tokens_total", "Positions of committed steps that have no target."
        )
        self.source_tokens = self._counter(
            "data_source_tokens_total", "Positions of sequences drawn from a source.", "source"
        )
        self.peak_memory = self._gauge(
            "peak_memory_bytes", "Peak memory of the rank that has had most."
        )

    def _declare_collectives_and_experts(self) -> None:
        self.collective_seconds = self._counter(
            "collective_seconds_total", "Seconds of collectives on rank 0.", "op", "group"
        )
        self.collective_bytes = self._counter(
            "collective_bytes_total", "Bytes that rank 0 gave to collectives.", "op", "group"
        )
        self.communication = self._gauge(
            "communication_time_ratio",
            "Share of a step in collectives that no computation hides.",
        )
        self.imbalance = self._gauge(
            "moe_expert_load_imbalance_ratio", "Largest over mean load of an expert.", "layer"
        )
        self.dead = self._gauge(
            "moe_dead_experts", "Experts without a token in a log interval.", "layer"
        )
        self.entropy = self._gauge(
            "moe_router_entropy_nats", "Mean entropy of a token's probabilities.", "layer"
        )
        self.aux_loss = self._gauge(
            "moe_aux_loss", "What auxiliary losses add to the model's loss, with coefficients."
        )
        self.aux_losses = {
            name: self._gauge(f"moe_{name}_loss", f"{text}, without its coefficient.", "layer")
            for name, text in (
                ("load_balance", "Load-balancing loss"),
                ("sequence_balance", "Load-balancing loss within sequences"),
                ("z", "Loss on the size of router logits"),
            )
        }
        self.dropped = self._counter(
            "moe_dropped_tokens_total", "Assignments that no expert had room for.", "layer"
        )
        self.rerouted = self._counter(
            "moe_rerouted_tokens_total", "Assignments that took another expert.", "layer"
        )
        self.rank_imbalance = self._gauge(
            "moe_rank_load_imbalance_ratio", "Largest over mean expert work of a rank."
        )
        self.capacity_share = self._gauge(
            "moe_capacity_share", "Planned expert work of a rank over its group's mean.", "rank"
        )
        self.relative_speed = self._gauge(
            "rank_relative_speed_ratio", "Expert speed of a rank over its group's mean.", "rank"
        )
        self.rank_compute = self._gauge(
            "rank_compute_seconds",
            "Time of a rank in the mean step of a log interval, without waits in collectives.",
            "rank",
        )
        self.straggler_speed = self._gauge(
            "straggler_speed_ratio", "Speed of a slow rank over that of the others.", "rank"
        )
        self.bias = self._gauge(
            "moe_router_bias_abs_max", "Largest bias of an expert, in magnitude."
        )

    def _declare_saves_and_checks(self) -> None:
        self.save_duration = Histogram(
            "convoy_checkpoint_duration_seconds",
            "What training waited (stall), until this rank's part was durable (write), and until "
            "all was (commit).",
            ["tier", "stage"],
            buckets=[0.01 * 2**i for i in range(16)],
            registry=self._registry,
        )
        self.verifications = self._counter(
            "verifications_total", "Checks that found no silent data corruption.", "kind"
        )
        self.verify_seconds = self._counter(
            "verify_seconds_total", "Seconds that training waited for these checks.", "kind"
        )
        self.corruptions = self._counter(
            "corruptions_total", "Checks that found silent data corruption.", "kind"
        )
        self.restore_duration = self._gauge(
            "restore_duration_seconds", "Time of this start's restore.", "tier"
        )
        self.last_checkpoint = self._gauge(
            "last_checkpoint_timestamp_seconds", "Unix time of the last commit.", "tier"
        )
        self.save_failures = self._counter(
            "checkpoint_failures_total", "Saves that rank 0 saw fail.", "tier"
        )
        self.stuck_ranks = self._gauge("stuck_ranks", "Ranks that are reported as stuck now.")
        self.started = self._gauge(
            "start_timestamp_seconds", "Unix time at which the process of rank 0 was started."
        )
        self.last_step = self._gauge(
            "last_step_timestamp_seconds", "Unix time of the last step; 0 before the first."
        )

    def _begin_at_zero(self) -> None:
        """Counters begin at 0 for each value of their label: increase() of Prometheus does not see
        a counter that begins at 1. Gauges that nothing is known of yet are not 0, but NaN."""
        for gauge in (
            self.loss, self.grad_norm, self.validation_loss, self.learning_rate, self.rate,
            self.mfu, self.consumed, self.peak_memory, self.communication, self.rank_imbalance,
            self.aux_loss, self.bias,
        ):  # fmt: skip
            gauge.set(math.nan)
        rules = ("not_finite", *HEALTH_RULES)
        for reason in (*rules, "overflow", "router_not_finite"):
            self.skipped.labels(reason)
        for rule in rules:
            self.signals.labels(rule)
        acts = ("skip", "go_back")
        for action in ("report", "lower_lr", "stop", *acts, *(f"{a}+lower_lr" for a in acts)):
            self.actions.labels(action)
        for kind in ("parameters", "gradients"):
            self.corruptions.labels(kind)
        for tier in ("memory", "local", "shared"):
            self.save_failures.labels(tier)

    def _remember(self, event: Event, at: float) -> None:
        """What a line of a former start still says in this one."""
        match event:
            case StepTaken():
                self.last_step.set(at)
                if isinstance(event, StepCommitted):
                    self._seen(event.step, event.tokens_seen)
            case CheckpointCommitted(tier=tier):
                self.last_checkpoint.labels(tier).set(at)
            case Resized(epoch=epoch):
                self.epoch.set(epoch)

    def _seen(self, step: int, tokens: int) -> None:
        self.step.set(step)
        self.tokens_seen = tokens

    def __call__(self, event: Event) -> None:
        """Publish what one event says."""
        if isinstance(event, StepTaken):
            self._step(event)
        match event:
            case StepCommitted():
                self._commit(event)
            case Launched(process_start=began):
                self.started.set(began)
            case RunStarted(step=step, world_size=world, topology_epoch=epoch):
                self.ranks.set(world)
                self.step.set(step)
                self.epoch.set(epoch)
            case Evaluated(loss=loss):
                self.validation_loss.set(loss)
            case CheckpointFailed(tier=tier):
                self.save_failures.labels(tier).inc()
            case StepSkipped(reason=reason, overflow=overflow):
                self.skipped.labels(reason).inc()
                self.overflows.inc(overflow)
            case HealthSignal(rule=rule):
                self.signals.labels(rule).inc()
            case HealthAction(action=action):
                self.actions.labels(action).inc()
            case FaultInjected(kind=kind):
                self.faults.labels(kind).inc()
            case IntervalEnded():
                self._interval(event)
            case DataFetched():
                self.data(event)
            case StragglerFound(rank=rank, speed=speed):
                self.straggler_speed.labels(str(rank)).set(speed)
            case StragglerEnded(rank=rank):
                with contextlib.suppress(KeyError):  # the rank became slow before this start
                    self.straggler_speed.remove(str(rank))
            case Verified(kind=kind, seconds=seconds):
                self.verifications.labels(kind).inc()
                self.verify_seconds.labels(kind).inc(seconds)
            case CorruptionFound(kind=kind):
                self.corruptions.labels(kind).inc()
            case RankStuck(ranks=ranks):
                self.stuck_ranks.inc(len(ranks))
            case DevicesSampled():
                self.devices(event)
            case RankMoves(ranks=ranks):
                self.stuck_ranks.dec(len(ranks))
            case Restored(seconds=seconds, tier=tier):
                self.restore_duration.labels(tier).set(seconds)
            case SaveBegun(stall_seconds=seconds, tiers=tiers):
                # The copy is one for all tiers: the fastest of them stands for the copy.
                self.save_duration.labels(tiers[0] if tiers else "none", "stall").observe(seconds)
            case CheckpointCommitted(tier=tier):
                self.save_duration.labels(tier, "write").observe(event.write_seconds)
                self.save_duration.labels(tier, "commit").observe(event.seconds)
                self.last_checkpoint.labels(tier).set(time.time())

    def _step(self, event: StepTaken) -> None:
        self.step_duration.observe(event.seconds)
        self.data_wait.inc(event.data_wait_seconds)
        self.last_step.set(time.time())
        for (op, group), seconds in event.collective_seconds.items():
            self.collective_seconds.labels(op, group).inc(seconds)
        for (op, group), count in event.collective_bytes.items():
            self.collective_bytes.labels(op, group).inc(count)

    def _commit(self, event: StepCommitted) -> None:
        self.steps.inc()
        self._seen(event.step, event.tokens_seen)
        self.tokens.inc(event.target_tokens)
        self.loss.set(event.loss)
        self.grad_norm.set(event.grad_norm)
        self.learning_rate.set(event.lr)
        self.rate.set(event.tokens_per_second)
        self.consumed.set(event.consumed_samples)
        self.model_flops.inc(event.model_flops)
        self.mfu.set(event.mfu)
        if event.samples is not None:
            self.padding.inc(event.samples * self._seq_len - event.target_tokens)

    def _interval(self, event: IntervalEnded) -> None:
        if event.peak_memory_bytes is not None:
            self.peak_memory.set(event.peak_memory_bytes)
        for source, count in event.source_tokens.items():
            self.source_tokens.labels(source).inc(count)
        if event.exposed_seconds:
            self.communication.set(sum(event.exposed_seconds.values()) / event.seconds)
        for depth, loss in enumerate(event.mtp_losses or (), start=1):
            self.mtp_loss.labels(str(depth)).set(loss)
        if event.routing is not None:
            self._routing(event.routing)
        self.float8(event)
        for rank, share in enumerate(event.capacity_shares or ()):
            self.capacity_share.labels(str(rank)).set(share)
        for rank, speed in enumerate(event.relative_speeds or ()):
            self.relative_speed.labels(str(rank)).set(speed)
        for rank, seconds in enumerate(event.rank_seconds or ()):
            self.rank_compute.labels(str(rank)).set(seconds)

    def _routing(self, routing: RoutingReport) -> None:
        if routing.bias_abs_max is not None:
            self.bias.set(routing.bias_abs_max)
        self.rank_imbalance.set(routing.rank_imbalance)
        self.aux_loss.set(routing.aux_loss)
        for name, gauge in self.aux_losses.items():
            for number, loss in zip(routing.layers, routing.aux_losses[name], strict=True):
                gauge.labels(str(number)).set(loss)
        for at, layer in enumerate(map(str, routing.layers)):
            counts = routing.tokens_per_expert[at]
            mean = sum(counts) / len(counts)
            self.imbalance.labels(layer).set(max(counts) / max(mean, 1e-9))
            self.dead.labels(layer).set(counts.count(0))
            self.entropy.labels(layer).set(routing.entropies[at])
            self.dropped.labels(layer).inc(routing.dropped[at])
            self.rerouted.labels(layer).inc(routing.rerouted[at])
