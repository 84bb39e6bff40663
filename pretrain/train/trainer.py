"""The training loop: steps, and what is done between them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from parallel import CollectiveKind, CommStats, all_reduce, grad_square_sum, scale_gradients
from pretrain.checkpoint import Checkpointer
from pretrain.data import Cursor
from pretrain.errors import HealthError
from pretrain.job import Job
from pretrain.model import forward_flops, peak_flops_per_second
from pretrain.observe import CapacityPlanned, Evaluated, StepCommitted, StepSkipped
from pretrain.optim import set_lr
from pretrain.parallelize import RoutingStats, StepResult
from pretrain.runtime import StopRequest
from pretrain.spec import learning_rate
from pretrain.state import Progress, rng_states, set_rng_states
from pretrain.train.barrier import Action, Decision, Report, decide, exchange
from pretrain.train.detection import LossWatch
from pretrain.train.evaluate import evaluate
from pretrain.train.interval_stats import (
    IntervalStats,
    is_communication_timed,
    seconds_and_bytes,
)


class Trainer:
    """Takes steps until the spec's last one, with evaluations and checkpoints between them.

    Args:
        job: model, optimizer and data, with their values restored.
        progress: the counters after the last committed step.
        checkpointer: what saves the run.
    """

    def __init__(self, job: Job, progress: Progress, checkpointer: Checkpointer) -> None:
        self.job, self.progress, self.checkpointer = job, progress, checkpointer
        spec, runtime = job.spec, job.runtime
        self.flops_per_token = forward_flops(spec.model, spec.moe, spec.data.seq_len).training
        self.peak_flops = runtime.total(peak_flops_per_second(runtime.device, spec.precision.dtype))
        """Of all ranks, in a second."""
        self.skipped = 0
        """Steps skipped in a row, overflows of float16 not counted."""
        self.interval = IntervalStats()
        self.loss_watch = LossWatch.of_job(job)

    def train(self, stop: StopRequest) -> bool:
        """Step until the spec's last step, or until some rank is asked to stop.

        Returns whether the run was asked to stop before its last step; either way the last step
        that was taken is committed.
        """
        spec, checkpointer = self.job.spec, self.checkpointer
        stopped = False
        while self.progress.step < spec.train.steps and not stopped:
            decision = self.step(stop.requested)
            checkpointer.poll()
            stopped = decision.stop
            if decision.action is Action.SKIP and not stopped:
                continue
            step = self.progress.step
            done = step == spec.train.steps
            last = stopped or done
            every = spec.train.log_interval_steps
            if self.interval.tokens and (step % every == 0 or done):
                self.end_interval(decision)
            every = spec.eval.interval_steps
            # Before the save: the manifest has the result, by which the best checkpoints stay. A
            # run that was asked to stop may have little time, and only saves.
            if every and (done or (step % every == 0 and not stopped)):
                self.validate()
            if checkpointer.due(step, requested=decision.save, last=last):
                self._beat("save")
                checkpointer.save(self.progress, last)
        self._beat("finish")
        checkpointer.finish(self.progress)
        return stopped and self.progress.step < spec.train.steps

    def step(self, stop_requested: bool) -> Decision:
        """One step: forward, backward, barrier, and the update where all ranks commit.

        After a float16 overflow the next step takes the same samples with half the loss scale.

        Raises HealthError on every rank after too many steps in a row that are not finite.
        """
        job, spec, before = self.job, self.job.spec, self.progress
        job.runtime.comm_monitor.take()  # what came between steps is not of this one
        self._beat("data")
        began = time.perf_counter()
        batches, cursor = job.loader.step(Cursor(before.consumed_samples))
        waited = time.perf_counter() - began
        planned = (cursor.sample_index - before.consumed_samples) * spec.data.seq_len
        scale, device = before.loss_scale, job.runtime.device
        random = {} if scale is None else rng_states(device)
        self._beat("forward_backward")
        result = job.forward_backward(batches, planned, scale)
        if job.compressed is not None:
            job.compressed.reduce(scale or 1.0)
        self._beat("barrier")
        report = self._report(result, began=began, waited=waited, stop_requested=stop_requested)
        reports = exchange(report, device)
        decision = decide(reports, planned, scale)
        self._beat("optimizer")
        self.loss_watch.after(before.step, reports)
        replanned = False
        if decision.action is Action.COMMIT:
            self._commit(decision, cursor, planned)
            if result.routing is not None:
                replanned = self._balance(result.routing, reports)
        if decision.overflow:
            self.progress = self.progress.after_overflow()
            set_rng_states(random, device)
        job.optimizer.zero_grad()
        traffic = job.runtime.comm_monitor.take()
        seconds = time.perf_counter() - began
        if decision.action is Action.SKIP:
            self._skip(decision, seconds, traffic)
            return decision
        self.interval.micro_batches = len(batches)
        self._publish_commit(decision, seconds, traffic)
        if replanned and job.balance is not None:
            # After its step's event: a plan holds from the next step on, and a replay reads it so.
            job.events.publish(
                CapacityPlanned(
                    step=self.progress.step,
                    plans=job.balance.plans,
                    relative_speeds=job.balance.relative_speeds,
                )
            )
        return decision

    def _beat(self, phase: str) -> None:
        self.job.runtime.heartbeat.beat(phase, self.progress.step)

    def _report(
        self, result: StepResult, *, began: float, waited: float, stop_requested: bool
    ) -> Report:
        """What this rank brings to the barrier."""
        scale = self.progress.loss_scale or 1.0
        return Report(
            loss_sum=float(result.loss_sum),
            target_tokens=result.target_tokens,
            grad_square_sum=float(grad_square_sum(self.job.model, self.job.dims)) / scale**2,
            stop_requested=stop_requested,
            save_requested=self.checkpointer.requested,
            step_seconds=time.perf_counter() - began,
            data_wait_seconds=waited,
            expert_rows=result.expert_rows,
            expert_seconds=result.expert_seconds,
            bad_layer=_bad_layer(self.job.moe_layers, result.routing),
        )

    def _commit(self, decision: Decision, cursor: Cursor, planned: int) -> None:
        job, clip = self.job, self.job.spec.optimizer.clip_norm
        factor = planned / decision.target_tokens
        if clip and decision.grad_norm > clip:
            factor *= clip / decision.grad_norm
        scale_gradients(job.model, factor / (decision.loss_scale or 1.0))
        set_lr(job.optimizer, learning_rate(job.spec, self.progress.step))
        job.optimizer.step()
        if job.compressed is not None:
            job.compressed.commit()
        before = self.progress
        first = before.train_loss_first
        progress = replace(
            before,
            step=before.step + 1,
            tokens_seen=before.tokens_seen + decision.target_tokens,
            consumed_samples=cursor.sample_index,
            train_loss_first=decision.loss if first is None else first,
            train_loss_last=decision.loss,
            validation=None,
        )
        self.progress = progress.after_commit(job.spec.precision.loss_scale_growth_steps)
        self.skipped = 0

    def _publish_commit(
        self, decision: Decision, seconds: float, traffic: Mapping[CollectiveKind, CommStats]
    ) -> None:
        """Publish a committed step, and add the step to the interval."""
        job, tokens = self.job, decision.target_tokens
        self.progress = replace(self.progress, train_seconds=self.progress.train_seconds + seconds)
        groups = self.interval.add(tokens, seconds, traffic)
        shown = {name: one for name, one in groups.items() if one.count}
        timed = is_communication_timed(job.runtime)
        collective_seconds, collective_bytes = seconds_and_bytes(traffic)
        job.events.publish(
            StepCommitted(
                step=self.progress.step,
                loss=decision.loss,
                grad_norm=decision.grad_norm,
                lr=job.optimizer.param_groups[0]["lr"],
                target_tokens=tokens,
                tokens_seen=self.progress.tokens_seen,
                consumed_samples=self.progress.consumed_samples,
                seconds=seconds,
                data_wait_seconds=decision.data_wait_seconds,
                slowest_rank_seconds=decision.step_seconds,
                tokens_per_second=tokens / seconds,
                mfu=self.mfu(tokens, seconds),
                model_flops=self.flops_per_token * tokens,
                communication_seconds={k: t.seconds for k, t in shown.items() if timed},
                exposed_seconds={k: t.exposed_seconds for k, t in shown.items() if timed},
                communication_bytes={k: t.bytes for k, t in shown.items()},
                loss_scale=decision.loss_scale,
                collective_seconds=collective_seconds,
                collective_bytes=collective_bytes,
            )
        )

    def _balance(self, routing: RoutingStats, reports: Sequence[Report]) -> bool:
        """Move biases and capacity by the whole step's loads; whether plans of capacity changed."""
        rows = [report.expert_rows for report in reports]
        self.interval.add_routing(routing, rows)
        balance = self.job.balance
        replanned = False
        if balance is not None:
            seconds = [report.expert_seconds for report in reports]
            replanned = balance.after(self.progress.step, rows, seconds)
        if balance is not None and replanned:
            balance.apply(self.job.routers, self.job.runtime.rank)
        moe = self.job.spec.moe
        if moe is None:
            return replanned
        moves = bool(moe.expert_bias and moe.bias_update_rate)
        counts = moe.aux_loss_scope == "previous_step"
        if moves or counts:
            everywhere = routing.tokens_per_expert_LE.clone()
            all_reduce(everywhere).wait()
            for row, router in zip(self.job.router_rows, self.job.routers, strict=True):
                if moves:
                    router.update_bias(everywhere[row])
                if counts:
                    router.set_step_counts(everywhere[row])
            if counts:
                self.progress = replace(self.progress, expert_counts=everywhere.tolist())
        return replanned

    def _skip(
        self, decision: Decision, seconds: float, traffic: Mapping[CollectiveKind, CommStats]
    ) -> None:
        self.skipped += not decision.overflow
        step = self.progress.step + 1
        collective_seconds, collective_bytes = seconds_and_bytes(traffic)
        self.job.events.publish(
            StepSkipped(
                step=step,
                loss=decision.loss,
                grad_norm=decision.grad_norm,
                seconds=seconds,
                data_wait_seconds=decision.data_wait_seconds,
                reason=decision.reason,
                why=decision.why,
                overflow=decision.overflow,
                bad_router=decision.bad_router,
                loss_scale=decision.loss_scale,
                collective_seconds=collective_seconds,
                collective_bytes=collective_bytes,
            )
        )
        if self.skipped >= self.job.spec.train.max_skipped_steps:
            # What came just before is suspect, and is not saved over an older state that is not.
            raise HealthError(
                f"step {step} was not finite {self.skipped} times in a row ({decision.why}); "
                f"{self.checkpointer.way_back()}"
            )

    def mfu(self, tokens: int, seconds: float) -> float:
        """Model FLOPs utilization (Chowdhery et al., arXiv 2204.02311, appendix B)."""
        return self.flops_per_token * tokens / seconds / self.peak_flops

    def end_interval(self, decision: Decision) -> None:
        """Publish what the steps since the last interval gathered; every rank must call."""
        interval, self.interval = self.interval, IntervalStats()
        self.job.events.publish(
            interval.event(
                self.job,
                self.progress.step,
                loss=decision.loss,
                grad_norm=decision.grad_norm,
                mfu=self.mfu(interval.tokens, interval.seconds),
            )
        )

    def validate(self) -> None:
        """Score some held-out sequences; every rank must call."""
        result = evaluate(self.job, self.job.spec.eval.sequences, step=self.progress.step)
        finite = result.loss if math.isfinite(result.loss) else None
        self.progress = replace(self.progress, validation=finite)
        self.job.events.publish(
            Evaluated(step=self.progress.step, loss=result.loss, bits_per_byte=result.bits_per_byte)
        )


def _bad_layer(layers: Sequence[int], routing: RoutingStats | None) -> int:
    """The first layer with logits that are not finite, or -1."""
    counts = [] if routing is None else routing.nonfinite_L.tolist()
    return next((layer for layer, count in zip(layers, counts, strict=False) if count), -1)
