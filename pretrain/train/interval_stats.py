"""What the committed steps of one log interval add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from parallel import CollectiveKind, CommStats, by_parallelism
from pretrain.job import Job
from pretrain.observe import IntervalEnded, RoutingReport
from pretrain.parallelize import RoutingStats, bubble
from pretrain.runtime import Runtime
from pretrain.train.barrier import Report
from pretrain.train.evaluate import sum_over_ranks

_MOST_LOGGED_RANKS = 256


@dataclass
class IntervalStats:
    """Sums over the committed steps since the last report, on this rank."""

    tokens: int = 0
    """Target tokens over all ranks."""
    seconds: float = 0.0
    micro_batches: int = 0
    """Of the last step, on each rank."""
    traffic: dict[str, CommStats] = field(default_factory=dict)
    """Collectives of this rank, by parallelism."""
    routing: RoutingStats | None = None
    rank_rows: list[float] = field(default_factory=list)
    """Routed tokens that each rank's experts computed."""
    rank_seconds: list[float] = field(default_factory=list)
    """Of each rank, without its waits in collectives, with its waits for batches."""
    steps: int = 0

    def add(
        self, tokens: int, seconds: float, traffic: Mapping[CollectiveKind, CommStats]
    ) -> dict[str, CommStats]:
        """Add a committed step; returns the step's collectives by parallelism."""
        self.tokens += tokens
        self.seconds += seconds
        groups = by_parallelism(traffic)
        for name, one in groups.items():
            self.traffic[name] = one.plus(self.traffic.get(name, CommStats()))
        return groups

    def add_reports(self, reports: Sequence[Report]) -> None:
        """Add what all ranks brought to the barrier of a committed step."""
        self.steps += 1
        before = self.rank_seconds or [0.0] * len(reports)
        self.rank_seconds = [
            sum_ + max(0.0, report.step_seconds - report.exposed_seconds)
            for sum_, report in zip(before, reports, strict=True)
        ]

    def add_routing(self, routing: RoutingStats, rank_rows: list[float]) -> None:
        """Add what the routers of this rank did, and what each rank's experts computed."""
        self.routing = routing.plus(self.routing)
        before = self.rank_rows or [0.0] * len(rank_rows)
        self.rank_rows = [a + b for a, b in zip(before, rank_rows, strict=True)]

    def event(
        self, job: Job, step: int, *, loss: float, grad_norm: float, mfu: float
    ) -> IntervalEnded:
        """The interval over all ranks; every rank must call."""
        timed = is_communication_timed(job.runtime)
        seconds, exposed = self._communication(job) if timed else ({}, {})
        stages, routing = timed and job.parallel_model.pipeline is not None, self._routing(job)
        p, pp = job.spec.parallel.pipeline, job.topology.pp
        return IntervalEnded(
            step=step,
            loss=loss,
            lr=job.optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            tokens_per_second=self.tokens / self.seconds,
            mfu=mfu,
            seconds=self.seconds,
            communication_seconds=seconds,
            exposed_seconds=exposed,
            bubble=exposed.get("pp", 0.0) / self.seconds if stages else None,
            bubble_formula=(
                bubble(pp, p.stages_per_rank, self.micro_batches, p.schedule) if stages else None
            ),
            load_imbalance=None if routing is None else max(_imbalances(routing) or [1.0]),
            router_entropy=None if routing is None else min(routing.entropies),
            dropped=None if routing is None else sum(routing.dropped),
            rerouted=None if routing is None else sum(routing.rerouted),
            layer_imbalances=_imbalances(routing),
            rank_seconds=(
                [sum_ / self.steps for sum_ in self.rank_seconds]
                if 0 < len(self.rank_seconds) <= _MOST_LOGGED_RANKS
                else None
            ),
            routing=routing,
            capacity_shares=None if job.balance is None else job.balance.shares,
            relative_speeds=None if job.balance is None else job.balance.relative_speeds,
        )

    def _communication(self, job: Job) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of the interval's collectives and the exposed part, means over ranks."""
        mine = [(t.seconds, t.exposed_seconds) for t in self.traffic.values()]
        means = sum_over_ranks(job, torch.tensor(mine, dtype=torch.float64)) / job.runtime.world
        seconds, exposed = (
            {k: s for k, s in zip(self.traffic, column, strict=True) if s}
            for column in means.T.tolist()
        )
        return seconds, exposed

    def _routing(self, job: Job) -> RoutingReport | None:
        if self.routing is None:
            return None
        rows = sum_over_ranks(job, self.routing.tokens_per_expert_LE).tolist()
        entropies = sum_over_ranks(job, self.routing.entropy_sum_L) / self.tokens
        biases = [r.expert_bias for r in job.routers if r.expert_bias is not None]
        bias = job.runtime.maximum(max((float(b.abs().max()) for b in biases), default=-1.0))
        moved = sum_over_ranks(job, self.routing.moved_L2).tolist()
        return RoutingReport(
            layers=job.moe_layers,
            tokens_per_expert=rows,
            entropies=entropies.tolist(),
            dropped=[dropped for dropped, _ in moved],
            rerouted=[rerouted for _, rerouted in moved],
            bias_abs_max=None if bias < 0 else bias,
            rank_imbalance=_imbalance(self.rank_rows, job.topology.pp),
        )


def is_communication_timed(runtime: Runtime) -> bool:
    """Whether seconds of collectives are measured: on CUDA only where the monitor is told to."""
    return runtime.device.type != "cuda" or runtime.comm_monitor.time_cuda


def seconds_and_bytes(
    traffic: Mapping[CollectiveKind, CommStats],
) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], int]]:
    """Seconds and bytes of a step's collectives by (operation, parallelism)."""
    rows = [((str(op), str(group)), one) for (op, group), one in traffic.items()]
    return {key: one.seconds for key, one in rows}, {key: one.bytes for key, one in rows}


def _imbalances(routing: RoutingReport | None) -> list[float] | None:
    if routing is None:
        return None
    return [max(row) * len(row) / sum(row) for row in routing.tokens_per_expert]


def _imbalance(rank_rows: list[float], stages: int) -> float:
    """The largest over the mean load of a rank, among ranks that have the same layers."""
    size = len(rank_rows) // stages
    groups = [rank_rows[i : i + size] for i in range(0, len(rank_rows), size)]
    return max(max(group) * size / max(sum(group), 1) for group in groups)
