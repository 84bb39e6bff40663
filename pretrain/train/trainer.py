"""The training loop: steps, and what is done between them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parallel import Traffic, all_reduce, by_parallelism, grad_square_sum, scale_gradients
from pretrain.checkpoint import Saves
from pretrain.data import Cursor
from pretrain.errors import HealthError
from pretrain.job import Job
from pretrain.model import forward_flops, peak_flops_per_second
from pretrain.observe import Metrics, RunLog, progress_line, say
from pretrain.optim import set_lr
from pretrain.parallelize import Routing, bubble
from pretrain.runtime import StopRequest
from pretrain.state import Progress, rng_states, set_rng_states
from pretrain.train.barrier import Action, Decision, Report, decide, exchange
from pretrain.train.evaluate import evaluate, sum_over_ranks


@dataclass
class Interval:
    """What the committed steps since the last report were."""

    tokens: int = 0
    seconds: float = 0.0
    micro_batches: int = 0
    """Of the last of them, on each rank."""
    traffic: dict[str, Traffic] = field(default_factory=dict)
    """This rank's, by parallelism."""
    routing: Routing | None = None
    rank_rows: list[float] = field(default_factory=list)
    """Rows that each rank's experts computed."""


class Training:
    """The loop's own state: where it is, and what a log interval has gathered."""

    def __init__(
        self,
        job: Job,
        progress: Progress,
        log: RunLog,
        metrics: Metrics,
        saves: Saves | None = None,
    ) -> None:
        self.job, self.progress, self.log, self.metrics = job, progress, log, metrics
        self.saves = saves
        spec, runtime = job.spec, job.runtime
        self.flops_per_token = forward_flops(spec.model, spec.moe, spec.data.seq_len).training
        self.peak_flops = runtime.total(peak_flops_per_second(runtime.device, spec.train.dtype))
        """Of all ranks, in a second."""
        self.saved = progress.step
        """The step of the newest checkpoint that was begun; 0 where there is none."""
        self.skipped = 0
        self.interval = Interval()

    def step(self, stop_requested: bool) -> Decision:
        """One step: forward, backward, barrier, and the update where all commit.

        After an overflow the next try has half the loss scale, and nothing else that is new.

        Raises HealthError on every rank after too many steps in a row that are not finite.
        """
        job, spec = self.job, self.job.spec
        job.runtime.watch.take()  # what came between steps is not of this one
        began = time.perf_counter()
        batches, cursor = job.loader.step(Cursor(self.progress.cursor))
        waited = time.perf_counter() - began
        planned = (cursor.sample_index - self.progress.cursor) * spec.data.seq_len
        scale, device = self.progress.loss_scale, job.runtime.device
        random = {} if scale is None else rng_states(device)
        result = job.forward_backward(batches, planned, scale)
        if job.compressed is not None:
            job.compressed.reduce(scale or 1.0)
        report = Report(
            loss_sum=float(result.loss_sum),
            target_tokens=result.target_tokens,
            grad_square_sum=float(grad_square_sum(job.model, job.dims)) / (scale or 1.0) ** 2,
            stop_requested=stop_requested,
            save_requested=self.saves is not None and self.saves.requested,
            step_seconds=time.perf_counter() - began,
            data_wait_seconds=waited,
            expert_rows=result.expert_rows,
            expert_seconds=result.expert_seconds,
            bad_layer=_bad_layer(job.moe_layers, result.routing),
        )
        reports = exchange(report, device)
        decision = decide(reports, planned, scale)
        lr = spec.optimizer.lr * spec.schedule.ratio(self.progress.step, spec.train.steps)
        replanned = False
        if decision.action is Action.COMMIT:
            self._commit(decision, lr, cursor, planned)
            if result.routing is not None:
                replanned = self._balance(result.routing, reports)
        if decision.overflow:
            self.progress = self.progress.after_overflow()
            set_rng_states(random, device)
        job.optimizer.zero_grad()
        traffic = job.runtime.watch.take()
        seconds = time.perf_counter() - began
        self.metrics.record_step(seconds, decision.data_wait_seconds)
        self.metrics.record_traffic(traffic)
        if decision.action is Action.COMMIT:
            self.interval.micro_batches = len(batches)
            self._record_commit(decision, lr, seconds, by_parallelism(traffic))
        if replanned and job.balance is not None:
            # After its step's line: a plan holds from the next one on, and a replay reads it so.
            self.log.write(
                "capacity_plan",
                step=self.progress.step,
                plans=job.balance.plans,
                relative_speeds=job.balance.relative_speeds,
            )
        if decision.action is Action.SKIP:
            self._skip(decision)
        return decision

    def _commit(self, decision: Decision, lr: float, cursor: Cursor, planned: int) -> None:
        job, clip = self.job, self.job.spec.optimizer.clip_norm
        factor = planned / decision.target_tokens
        if clip and decision.grad_norm > clip:
            factor *= clip / decision.grad_norm
        scale_gradients(job.model, factor / (decision.loss_scale or 1.0))
        set_lr(job.optimizer, lr)
        job.optimizer.step()
        if job.compressed is not None:
            job.compressed.commit()
        before = self.progress
        first = before.train_loss_first
        progress = replace(
            before,
            step=before.step + 1,
            tokens_seen=before.tokens_seen + decision.target_tokens,
            cursor=cursor.sample_index,
            train_loss_first=decision.loss if first is None else first,
            train_loss_last=decision.loss,
            validation=None,
        )
        self.progress = progress.after_commit(job.spec.train.loss_scale_growth_steps)
        self.skipped = 0

    def _record_commit(
        self, decision: Decision, lr: float, seconds: float, traffic: dict[str, Traffic]
    ) -> None:
        """Log and add up what a committed step took."""
        self.progress = replace(self.progress, train_seconds=self.progress.train_seconds + seconds)
        interval, tokens = self.interval, decision.target_tokens
        interval.tokens += tokens
        interval.seconds += seconds
        for name, one in traffic.items():
            interval.traffic[name] = one.plus(interval.traffic.get(name, Traffic()))
        mfu = self.mfu(tokens, seconds)
        self.metrics.record_commit(
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            lr=lr,
            target_tokens=tokens,
            cursor=self.progress.cursor,
            seconds=seconds,
        )
        self.metrics.record_flops(self.flops_per_token * tokens, mfu)
        self.log.write(
            "step",
            step=self.progress.step,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            lr=lr,
            tokens_seen=self.progress.tokens_seen,
            cursor=self.progress.cursor,
            seconds=seconds,
            slowest_rank_seconds=decision.step_seconds,
            tokens_per_second=tokens / seconds,
            mfu=mfu,
            communication_seconds={k: t.seconds for k, t in traffic.items() if t.count},
            exposed_seconds={k: t.exposed_seconds for k, t in traffic.items() if t.count},
            communication_bytes={k: t.bytes for k, t in traffic.items() if t.count},
            **_loss_scale(decision),
        )

    def _balance(self, routing: Routing, reports: Sequence[Report]) -> bool:
        """Add to the interval's figures, and move biases and capacity by the whole step's loads;
        whether plans of capacity changed."""
        interval = self.interval
        interval.routing = routing.plus(interval.routing)
        before = interval.rank_rows or [0.0] * len(reports)
        interval.rank_rows = [a + r.expert_rows for a, r in zip(before, reports, strict=True)]
        balance = self.job.balance
        replanned = balance is not None and balance.after(
            self.progress.step,
            [r.expert_rows for r in reports],
            [r.expert_seconds for r in reports],
        )
        if balance is not None and replanned:
            balance.apply(self.job.routers, self.job.runtime.rank)
        moe = self.job.spec.moe
        if moe is not None and moe.expert_bias and moe.bias_update_rate:
            everywhere = routing.tokens_per_expert_LE.clone()
            all_reduce(everywhere).wait()
            for row, router in zip(self.job.router_rows, self.job.routers, strict=True):
                router.update_bias(everywhere[row])
        return replanned

    def _skip(self, decision: Decision) -> None:
        self.skipped += not decision.overflow
        step = self.progress.step + 1
        self.metrics.record_skip(decision.reason, decision.overflow)
        self.log.write(
            "skip",
            step=step,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            bad_router=decision.bad_router,
            reason=decision.reason,
            **_loss_scale(decision),
        )
        if self.job.runtime.is_first:
            say(f"step {step} skipped: {decision.why}")
        if self.skipped >= self.job.spec.train.max_skipped_steps:
            raise HealthError(
                f"step {step} was not finite {self.skipped} times in a row ({decision.why}); "
                f"{self._way_back()}"
            )

    def _way_back(self) -> str:
        # What came just before is suspect: it is not saved over an older state that is not.
        root = self.job.spec.checkpoint_path
        if not self.saved:
            return "nothing was saved; start over with a lower optimizer.lr"
        return (
            f"the newest checkpoint is step {self.saved} in {root}; lower optimizer.lr, and if the "
            f"state was bad by then move its manifest away to resume from the one before"
        )

    def mfu(self, tokens: int, seconds: float) -> float:
        """Model FLOPs utilization (Chowdhery et al., arXiv 2204.02311, appendix B)."""
        return self.flops_per_token * tokens / seconds / self.peak_flops

    def report_interval(self, decision: Decision) -> None:
        """Print and publish what the last steps gathered; every rank must call."""
        job, interval = self.job, self.interval
        values: dict[str, Any] = {
            "loss": decision.loss,
            "lr": job.optimizer.param_groups[0]["lr"],
            "grad_norm": decision.grad_norm,
            "tokens_per_second": interval.tokens / interval.seconds,
            "mfu": self.mfu(interval.tokens, interval.seconds),
            "seconds": interval.seconds,
            **self._communication(),
        }
        if interval.routing is not None:
            rows = sum_over_ranks(job, interval.routing.tokens_per_expert_LE).tolist()
            entropy_sums = sum_over_ranks(job, interval.routing.entropy_sum_L)
            entropies = (entropy_sums / interval.tokens).tolist()
            biases = [r.expert_bias for r in job.routers if r.expert_bias is not None]
            bias = job.runtime.maximum(max((float(b.abs().max()) for b in biases), default=-1.0))
            moved = sum_over_ranks(job, interval.routing.moved_L2).tolist()
            self.metrics.record_routing(
                job.moe_layers, rows, entropies, moved, None if bias < 0 else bias
            )
            self.metrics.rank_imbalance.set(_imbalance(interval.rank_rows, job.topology.pp))
            if job.balance is not None:
                self.metrics.record_capacity(job.balance.shares, job.balance.relative_speeds)
            values["dropped"] = sum(dropped for dropped, _ in moved)
            values["rerouted"] = sum(rerouted for _, rerouted in moved)
            values["load_imbalance"] = max(max(row) * len(row) / sum(row) for row in rows)
            values["router_entropy"] = min(entropies)
        if job.runtime.is_first:
            say(progress_line(self.progress.step, job.spec.train.steps, values))
        self.log.write("interval", step=self.progress.step, **values)
        self.interval = Interval()

    def _communication(self) -> dict[str, Any]:
        """What the interval's collectives took, and of it what nothing hid: means over ranks."""
        job, interval = self.job, self.interval
        mine = [(t.seconds, t.exposed_seconds) for t in interval.traffic.values()]
        means = sum_over_ranks(job, torch.tensor(mine, dtype=torch.float64)) / job.runtime.world
        seconds, exposed = (
            {k: s for k, s in zip(interval.traffic, column, strict=True) if s}
            for column in means.T.tolist()
        )
        self.metrics.communication.set(sum(exposed.values()) / interval.seconds)
        values: dict[str, Any] = {"communication_seconds": seconds, "exposed_seconds": exposed}
        if job.laid_out.pipeline is not None:
            values["bubble"] = exposed.get("pp", 0.0) / interval.seconds
            p = job.spec.parallel
            values["bubble_formula"] = bubble(
                p.pp, p.pp_stages_per_rank, interval.micro_batches, p.pp_schedule
            )
        return values

    def validate(self) -> None:
        """Score some held-out sequences; every rank must call."""
        job = self.job
        result = evaluate(job, job.spec.train.eval_sequences)
        bits = result.bits_per_byte
        finite = result.loss if math.isfinite(result.loss) else None
        self.progress = replace(self.progress, validation=finite)
        self.log.write("eval", step=self.progress.step, loss=result.loss, bits_per_byte=bits)
        if job.runtime.is_first:
            say(f"validation at step {self.progress.step}: {bits:.4f} bits per byte")

    def save(self, last: bool) -> None:
        """Begin a checkpoint, the ``last`` one in all tiers; every rank must call."""
        assert self.saves is not None
        self.saves.save(self.progress, last)
        self.saved = self.progress.step


def _loss_scale(decision: Decision) -> dict[str, float]:
    """What the log says of it: nothing but in float16."""
    return {} if decision.loss_scale is None else {"loss_scale": decision.loss_scale}


def _imbalance(rank_rows: list[float], stages: int) -> float:
    """The largest over the mean load of a rank, among ranks that have the same layers."""
    size = len(rank_rows) // stages
    groups = [rank_rows[i : i + size] for i in range(0, len(rank_rows), size)]
    return max(max(group) * size / max(sum(group), 1) for group in groups)


def _bad_layer(layers: list[int], routing: Routing | None) -> int:
    """The first layer with logits that are not finite, or -1."""
    counts = [] if routing is None else routing.not_finite_L.tolist()
    return next((layer for layer, count in zip(layers, counts, strict=False) if count), -1)


def train(training: Training, stop: StopRequest) -> bool:
    """Step until the spec's last, with evaluations and checkpoints on the way.

    Returns whether the run was asked to stop before that; either way the last step is committed.
    """
    spec, saves = training.job.spec, training.saves
    stopped = False
    while training.progress.step < spec.train.steps and not stopped:
        decision = training.step(stop.requested)
        if saves is not None:
            saves.poll()
        stopped = decision.stop
        if decision.action is Action.SKIP and not stopped:
            continue
        step = training.progress.step
        if training.interval.tokens and (
            step % spec.train.log_interval_steps == 0 or step == spec.train.steps
        ):
            training.report_interval(decision)
        every = spec.train.eval_interval_steps
        if every and step % every == 0 and step < spec.train.steps and not stopped:
            training.validate()
        last = stopped or step == spec.train.steps
        if saves is None or training.saved == step:
            continue
        if last or saves.clock.due(step, decision.save):
            training.save(last)
    if saves is not None:
        saves.finish(training.progress)
    return stopped and training.progress.step < spec.train.steps
