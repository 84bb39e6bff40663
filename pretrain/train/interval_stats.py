"""What the committed steps of one log interval add up to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moe import FLOAT8_OPERANDS, Float8Tally, MoEConfig
from parallel import CollectiveKind, CommStats, by_parallelism
from pretrain.data import Blend, Corpora
from pretrain.job import Job
from pretrain.observe import IntervalEnded, RoutingReport
from pretrain.parallelize import AUX_LOSSES, MTPLoss, RoutingStats, bubble
from pretrain.parts.step import Reports
from pretrain.runtime import Runtime, peak_memory_bytes
from pretrain.state import Progress
from pretrain.train.expert_loads import load_quantiles, loads, logged_loads

_MOST_LOGGED_RANKS = 256


@dataclass
class IntervalStats:
    """Sums over the committed steps since the last report, on this rank."""

    first_sample: int
    """The sample index at which the interval begins."""
    tokens: int = 0
    """Target tokens over all ranks."""
    positions: int = 0
    """Positions of sequences over all ranks; those of padding have no target."""
    seconds: float = 0.0
    micro_batches: int = 0
    """Of the last step, on each rank."""
    traffic: dict[str, CommStats] = field(default_factory=dict)
    """Collectives of this rank, by parallelism."""
    routing: RoutingStats | None = None
    rank_rows: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Routed tokens that each rank's experts computed."""
    rank_seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))
    """Of each rank, without its waits in collectives, with its waits for batches."""
    steps: int = 0
    mtp_loss_sums_K: Tensor | None = None
    """Of each layer of multi-token prediction, on this rank."""
    mtp_targets: list[int] = field(default_factory=list)
    """Of each layer of multi-token prediction, over all ranks."""

    def add(
        self,
        tokens: int,
        positions: int,
        *,
        seconds: float,
        traffic: Mapping[CollectiveKind, CommStats],
    ) -> dict[str, CommStats]:
        """Add a committed step; returns the step's collectives by parallelism."""
        self.tokens += tokens
        self.positions += positions
        self.seconds += seconds
        groups = by_parallelism(traffic)
        for name, stats in groups.items():
            self.traffic[name] = stats.plus(self.traffic.get(name, CommStats()))
        return groups

    def add_reports(self, reports: Reports) -> None:
        """Add what all ranks brought to the barrier of a committed step."""
        self.steps += 1
        own = reports.column("step_seconds") - reports.column("exposed_seconds")
        self.rank_seconds = _plus(self.rank_seconds, np.maximum(own, 0.0))

    def add_mtp(self, loss_sums_K: Tensor, mtp: MTPLoss) -> None:
        """Add the losses of multi-token prediction of a committed step."""
        before = self.mtp_loss_sums_K
        self.mtp_loss_sums_K = loss_sums_K if before is None else before + loss_sums_K
        counts = self.mtp_targets or [0] * len(mtp.targets)
        self.mtp_targets = [a + b for a, b in zip(counts, mtp.targets, strict=True)]

    def add_routing(self, routing: RoutingStats, rank_rows: np.ndarray) -> None:
        """Add what the routers of this rank did, and what each rank's experts computed."""
        self.routing = routing.plus(self.routing)
        self.rank_rows = _plus(self.rank_rows, rank_rows)

    def event(
        self, job: Job, progress: Progress, *, loss: float, grad_norm: float, mfu: float
    ) -> IntervalEnded:
        """The interval over all ranks up to ``progress``; every rank must call."""
        runtime, balance = job.runtime, job.balance
        timed = is_communication_timed(runtime)
        seconds, exposed = self._communication(runtime) if timed else ({}, {})
        stages, routing = timed and job.parallel_model.pipeline is not None, self._routing(job)
        p, pp = job.spec.parallel.pipeline, job.topology.pp
        underflow, overflow = _float8(job.parallel_model.float8, runtime)
        loads_LE = loads([] if routing is None else routing.tokens_per_expert)
        imbalances = loads_LE.max(1).tolist()
        every = job.spec.train.log_interval_steps
        return IntervalEnded(
            step=progress.step,
            loss=loss,
            lr=job.optimizer.param_groups[0]["lr"],
            grad_norm=grad_norm,
            tokens_per_second=self.tokens / self.seconds,
            mfu=mfu,
            seconds=self.seconds,
            tokens_seen=progress.tokens_seen,
            aux_loss=None if routing is None else routing.aux_loss,
            aux_losses=_mean_losses(job.spec.moe, routing),
            mtp_losses=self.mtp_losses(runtime),
            padding=1 - self.tokens / self.positions if self.tokens < self.positions else None,
            source_tokens=self._source_tokens(job.corpora, job.loader.blend, progress),
            peak_memory_bytes=int(runtime.maximum_in_training(peak_memory_bytes())),
            communication_seconds=seconds,
            exposed_seconds=exposed,
            bubble=exposed.get("pp", 0.0) / self.seconds if stages else None,
            bubble_formula=(
                bubble(pp, p.stages_per_rank, self.micro_batches, p.schedule) if stages else None
            ),
            load_imbalance=None if routing is None else max(imbalances, default=1.0),
            router_entropy=None if routing is None else min(routing.entropies),
            dropped=None if routing is None else sum(routing.dropped),
            rerouted=None if routing is None else sum(routing.rerouted),
            copied=None if routing is None else sum(routing.copied),
            layer_imbalances=None if routing is None else imbalances,
            load_quantiles=load_quantiles(loads_LE),
            expert_loads=logged_loads(loads_LE, job.moe_layers, -(-progress.step // every)),
            rank_seconds=(
                (self.rank_seconds / self.steps).tolist()
                if 0 < len(self.rank_seconds) <= _MOST_LOGGED_RANKS
                else None
            ),
            routing=routing,
            float8_underflow=underflow,
            float8_overflow=overflow,
            capacity_shares=None if balance is None else balance.shares,
            relative_speeds=None if balance is None else balance.relative_speeds,
        )

    def _communication(self, runtime: Runtime) -> tuple[dict[str, float], dict[str, float]]:
        """Seconds of the interval's collectives and the exposed part, means over ranks."""
        mine = [(t.seconds, t.exposed_seconds) for t in self.traffic.values()]
        means = runtime.sum_in_training(torch.tensor(mine, dtype=torch.float64)) / runtime.world
        seconds, exposed = (
            {k: s for k, s in zip(self.traffic, column, strict=True) if s}
            for column in means.T.tolist()
        )
        return seconds, exposed

    def _source_tokens(
        self, corpora: Corpora, blend: Blend | None, progress: Progress
    ) -> dict[str, int]:
        """Positions of the interval's sequences by the name of their source."""
        names = {source.manifest.fingerprint: source.name for source in corpora.sources}
        if len(names) < 2 or blend is None:
            return {}
        samples = np.arange(self.first_sample, progress.consumed_samples)
        for first, stop in progress.health.skipped_samples:
            samples = samples[(samples < first) | (samples >= stop)]
        positions = dict.fromkeys(names.values(), 0)
        for source, indices, _ in blend.draw(samples):
            name = names.get(source, source[:12])  # of the spec before, until the blend changes
            positions[name] = positions.get(name, 0) + len(indices) * corpora.data.seq_len
        return positions

    def mtp_losses(self, runtime: Runtime) -> list[float] | None:
        """The mean loss of each layer of multi-token prediction over all ranks; every rank must
        call."""
        if self.mtp_loss_sums_K is None or not self.mtp_targets:
            return None
        sums = runtime.sum_in_training(self.mtp_loss_sums_K).tolist()
        return [nats / max(count, 1) for nats, count in zip(sums, self.mtp_targets, strict=True)]

    def _routing(self, job: Job) -> RoutingReport | None:
        if self.routing is None:
            return None
        runtime = job.runtime
        rows = runtime.sum_in_training(self.routing.tokens_per_expert_LE).tolist()
        tokens_L = runtime.sum_in_training(self.routing.tokens_L).clamp(min=1)
        entropies = runtime.sum_in_training(self.routing.entropy_sum_L) / tokens_L
        biases = [r.expert_bias for r in job.routers if r.expert_bias is not None]
        bias = runtime.maximum_in_training(max((float(b.abs().max()) for b in biases), default=-1))
        moved_3L = runtime.sum_in_training(self.routing.moved_L3).T.tolist()
        sums = runtime.sum_in_training(self.routing.aux_loss_sum_LA).T.tolist()
        losses = {
            name: [total / tokens for total, tokens in zip(column, tokens_L.tolist(), strict=True)]
            for name, column in zip(AUX_LOSSES, sums, strict=True)
        }
        del losses["all"]
        return RoutingReport(
            aux_loss=sum(sums[AUX_LOSSES.index("all")]) / self.tokens,
            aux_losses=losses,
            layers=job.moe_layers,
            tokens_per_expert=rows,
            entropies=entropies.tolist(),
            dropped=moved_3L[0],
            rerouted=moved_3L[1],
            copied=moved_3L[2],
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
    by_key = {(str(op), str(group)): stats for (op, group), stats in traffic.items()}
    return (
        {key: stats.seconds for key, stats in by_key.items()},
        {key: stats.bytes for key, stats in by_key.items()},
    )


def _float8(
    tallies: Mapping[str, Float8Tally], runtime: Runtime
) -> tuple[dict[str, float], dict[str, int]]:
    """The event's ``float8_underflow`` and ``float8_overflow``."""
    shares, bad = {}, {}
    for layers, tally in sorted(tallies.items()):
        counts = runtime.sum_in_training(tally.take()).tolist()
        for operand, (nonzero, flushed, tiles) in zip(FLOAT8_OPERANDS, counts, strict=True):
            bad[f"{layers}.{operand}"] = tiles
            if nonzero:
                shares[f"{layers}.{operand}"] = flushed / nonzero
    return shares, bad


def _mean_losses(moe: MoEConfig | None, routing: RoutingReport | None) -> dict[str, float]:
    """The mean over layers of each auxiliary loss that the layers have."""
    if routing is None or moe is None:
        return {}
    coefficients = {
        "load_balance": moe.aux_loss_coeff,
        "sequence_balance": moe.seq_aux_loss_coeff,
        "z": moe.z_loss_coeff,
    }
    return {
        name: sum(losses) / len(losses)
        for name, losses in routing.aux_losses.items()
        if coefficients[name]
    }


def _plus(before: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Sums over steps; before the first step there are none."""
    return before + more if len(before) else more.copy()


def _imbalance(rank_rows: np.ndarray, stages: int) -> float:
    """The largest over the mean load of a rank, among ranks that have the same layers."""
    groups = rank_rows.reshape(stages, -1)
    return float((groups.max(1) * groups.shape[1] / np.maximum(groups.sum(1), 1)).max())
