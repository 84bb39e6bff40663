"""The training loop: steps, and what is done between them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from parallel import scale_gradients
from parallel.crossing import RegroupError, installed_crossing
from pretrain.checkpoint import Checkpointer
from pretrain.data import Cursor, Loader, data_checksum
from pretrain.elastic import Standing
from pretrain.errors import LostRankError
from pretrain.job import Job, compute_dtype
from pretrain.model import forward_flops, peak_flops_per_second
from pretrain.observe import Evaluated, StepCommitted, StepSkipped
from pretrain.optim import set_lr
from pretrain.parallelize import RoutingStats
from pretrain.parts.faults import Faults
from pretrain.parts.playbook import after_skip, routers_are_checked
from pretrain.parts.step import Action, Decision, Report, Reports, StepFacts, with_wish
from pretrain.runtime import StopCause, StopRequest
from pretrain.spec import learning_rate
from pretrain.state import GROWTH_STEPS, Progress, rng_states, set_rng_states
from pretrain.train.attempt import Attempt
from pretrain.train.barrier import Rows, bad_layer, decide, exchange
from pretrain.train.data_fetches import publish_fetches
from pretrain.train.digests import StepDigests
from pretrain.train.evaluate import StoppedEvaluationError, evaluate
from pretrain.train.health_watch import HealthWatch
from pretrain.train.interval_stats import (
    IntervalStats,
    is_communication_timed,
    seconds_and_bytes,
)
from pretrain.train.moved import FirstStep
from pretrain.train.profile import StepProfiler
from pretrain.train.verify import Verifier


class Trainer:
    """Takes steps until the spec's last one, with evaluations and checkpoints between them.

    Args:
        job: model, optimizer and data, with their values restored.
        progress: the counters after the last committed step.
        checkpointer: what saves the run.
        faults: what happens on purpose at the places of a step.
        profiler: the trace of some steps; None for none.
        standing: what this rank would bring to a meeting of replicas.
        wants_meeting: whether a replica waits to be taken in.
    """

    def __init__(
        self,
        job: Job,
        progress: Progress,
        checkpointer: Checkpointer,
        faults: Faults | None = None,
        profiler: StepProfiler | None = None,
        standing: Standing | None = None,
        wants_meeting: Callable[[], bool] = lambda: False,
    ) -> None:
        self.job, self.checkpointer = job, checkpointer
        spec, runtime = job.spec, job.runtime
        self.profiler = profiler or StepProfiler.of_rank(None, runtime, job.events, spec.run_path)
        self.faults, self.watch = faults or Faults(), HealthWatch(job)
        self.verifier = Verifier(job, checkpointer)
        self.digests = StepDigests(job)
        self.first_step: FirstStep | None = None
        if installed_crossing() is None:  # it asks the other ranks, which a commit must not
            self.first_step = FirstStep(
                job.parallel_model, job.optimizer, spec.tune, job.events.publish
            )
        self.progress = self.verifier.begin(progress)
        self.flops_per_token = forward_flops(spec.model, spec.moe, spec.data.seq_len).training
        peak_flops = peak_flops_per_second(runtime.device, compute_dtype(spec.precision))
        self.peak_flops = runtime.total(peak_flops)
        """Of all ranks, in a second."""
        self.skipped = 0
        """Tries in a row that were not finite, overflows of float16 not counted."""
        self.interval = IntervalStats(self.progress.consumed_samples)
        self.starts_again = False
        """Whether the run must end after this step, for a start without a slow machine."""
        self.standing, self.wants_meeting = standing or Standing(), wants_meeting
        self.attempt: Attempt | None = None
        """The newest try of a step."""
        self.rows: Rows | None = None
        """What the newest barrier exchanged."""
        self.committed: tuple[Decision, Attempt] | None = None
        """The newest step that was committed."""
        self.stop_cause = StopCause.NONE
        """Why the last step was the last one, where a rank asked to stop."""

    def train(self, stop: StopRequest) -> bool:
        """Step until the spec's last step, or until some rank is asked to stop.

        Returns whether the run was asked to stop before its last step; either way the last step
        that was taken is committed.
        """
        spec, checkpointer = self.job.spec, self.checkpointer
        stopped = False
        if self.standing.done_step < self.progress.step and self.standing.ready:
            self.between_steps(stop)  # which another epoch has begun, and its end broke off
        while self.progress.step < spec.train.steps and not stopped:
            decision = self.step(stop.cause)
            self.profiler.end_step()
            checkpointer.poll()
            stopped = decision.stop or self.starts_again
            self.stop_cause = StopCause(decision.stop_cause)
            if decision.stop and self.stop_cause is StopCause.NONE:
                self.stop_cause = StopCause.PART
                stop.ends_launch = True
            stop.is_final = self.stop_cause > StopCause.SIGNAL
            if self.starts_again and not stop.is_final:
                self.stop_cause = StopCause.SLOW_MACHINE
            if decision.action is Action.SKIP and not stopped:
                continue
            step = self.progress.step
            done = step == spec.train.steps
            last = stopped or done
            if self.interval.tokens and self._ends_interval(step):
                self.end_interval(decision)
            every = spec.eval.interval_steps
            # Before the save: the manifest has the result, by which the best checkpoints stay. A
            # run that was asked to stop may have little time, and only saves.
            if every and (done or (step % every == 0 and not stopped)):
                self.validate(stop)
            due = checkpointer.due(step, requested=decision.save, last=last)
            if due:
                self._beat("save")
            self.verifier.compare_parameters(self.progress, saves=due)
            if due:
                checkpointer.save(self.progress, last)
            self.standing.done_step = step
            if decision.regroup and not last:
                raise RegroupError("a replica comes back")
        self._beat("finish")
        checkpointer.finish(self.progress)
        return stopped and self.progress.step < spec.train.steps

    def between_steps(self, stop: StopRequest) -> None:
        """Evaluate and save again after the newest step, where that is due."""
        step, every = self.progress.step, self.job.spec.eval.interval_steps
        last = step == self.job.spec.train.steps
        if every and (last or step % every == 0):
            self.validate(stop)
        if self.checkpointer.due(step, requested=False, last=last):
            self._beat("save")
            self.checkpointer.save(self.progress, last)
        self.standing.done_step = step

    def step(self, stop_requested: int) -> Decision:
        """One step: data, backward, barrier, and the acts that all ranks decide alike.

        After a float16 overflow the next step takes the same samples with half the loss scale.

        Raises HealthError on every rank where a rule of ``[health]`` stops the run, and
        CorruptionError where a check of ``[verify]`` fails.
        """
        before = self.progress
        self.attempt = attempt = self._read(before)
        self._backward(attempt, before)
        self._exchange(attempt, stop_requested)
        facts = self.advance()
        decision = facts.decision
        if decision.action is Action.COMMIT:
            self.digests.see_parameters()
        if decision.overflow:
            self.progress = self.progress.after_overflow()
            set_rng_states(attempt.random, self.job.runtime.device)
        self.job.optimizer.zero_grad()
        attempt.end(self.job.runtime.comm_monitor.take())
        if decision.action is Action.SKIP:
            self.standing.ready, ready = False, self.standing.ready
            self._skip(decision, attempt)
            self.standing.ready = ready
            return decision
        self._publish_commit(decision, attempt)
        self.verifier.compare_digests(self.digests.publish(self.progress.step), self.progress)
        return self._after(facts, attempt)

    def _read(self, before: Progress) -> Attempt:
        """The data of the step, after what happens between steps."""
        self._beat("data")
        self.faults.before_step(before.step + 1)
        self.verifier.before_step(before, self._read_step)
        self.job.runtime.comm_monitor.take()  # what came between steps is not of this one
        began = time.perf_counter()
        batches, cursor, planned = self._read_step(self.job.loader)
        waited = time.perf_counter() - began
        return Attempt(
            batches=self.faults.batches(batches),
            cursor=cursor,
            planned=planned,
            began=began,
            waited=waited,
        )

    def _backward(self, attempt: Attempt, before: Progress) -> None:
        """Forward and backward, and the sums of gradients over ranks."""
        job, scale = self.job, before.loss_scale
        for tally in job.parallel_model.float8.values():
            # One step of each log interval: the count reads every operand once more.
            tally.counts_underflow = self._ends_interval(before.step + 1)
        attempt.random = {} if scale is None else rng_states(job.runtime.device)
        attempt.mtp = job.mtp_loss(attempt.batches, attempt.planned, before.consumed_samples)
        self._beat("forward_backward")
        with self.verifier.seeing_gradients():
            attempt.result = job.forward_backward(
                attempt.batches, attempt.planned, scale, attempt.mtp
            )
        self.progress = self.verifier.after_backward(before)
        if job.compressed is not None:
            job.compressed.reduce(scale or 1.0)
        self.faults.gradients(job.model)
        self.digests.see_gradients()
        routing, health = attempt.result.routing, self.job.spec.health
        if routing is not None and (
            self._uses_loads or routers_are_checked(health, before.step + 1)
        ):
            _ = routing.everywhere_LE  # here: after the barrier no rank waits for another
        if routing is not None and routing.margins_LEM is not None:
            _ = routing.margins_everywhere_LEM

    def _exchange(self, attempt: Attempt, stop_requested: int) -> None:
        """Bring this rank's vector to the barrier, and take all ranks'."""
        self._beat("barrier")
        report, parts = self._report(attempt, stop_requested), self.job.parts
        own = {f"{p.name}.{k}": float(v) for p in parts for k, v in p.report(report).items()}
        self.rows = exchange(report, self.job.runtime.device, own)
        self.standing.turn += 1

    def advance(self, rows: Rows | None = None) -> StepFacts:
        """Move the state on as the newest barrier says, without any other rank.

        Args:
            rows: what the barrier exchanged, where another rank has them and this one has not.
        """
        if rows is not None:
            self.rows = rows
            self.standing.turn += 1
        before, attempt = self.progress, self.attempt
        assert attempt is not None
        facts = self._decide(attempt, before)
        self._beat("optimizer")
        if facts.decision.action is Action.COMMIT:
            self._commit(facts, attempt)
            self._count(facts, attempt)
        elif rows is not None:
            raise LostRankError(f"step {before.step + 1} was not committed while a rank was lost")
        return facts

    def _decide(self, attempt: Attempt, before: Progress) -> StepFacts:
        """The one decision of all ranks; rules of health come before other parts."""
        assert self.rows is not None
        (reports, columns), parts = self.rows, self.job.parts
        decision = decide(reports, attempt.planned, before.loss_scale)
        decision = self.watch.judged(decision, before, self.skipped, attempt.result.routing)
        facts = StepFacts(before.step + 1, reports, decision, columns)
        for part in parts:
            decision = with_wish(decision, part.judge(facts))
        return replace(facts, decision=decision)

    def _after(self, facts: StepFacts, attempt: Attempt) -> Decision:
        """Tell the parts of a committed step, and do what they wish for coming steps.

        Returns the decision, with the wishes to save and to stop.
        """
        facts = replace(facts, next_micro_batches=self.job.loader.num_micro_batches(attempt.cursor))
        for part in self.job.parts:
            wish = part.after(facts)
            if wish is None:
                continue
            self.job.act(wish)
            self.starts_again |= wish.starts_again
            decision = with_wish(facts.decision, replace(wish, skip=None))
            changed = facts.capacity_changed or bool(wish.plans)
            facts = replace(facts, decision=decision, capacity_changed=changed)
        return facts.decision

    def _ends_interval(self, step: int) -> bool:
        train = self.job.spec.train
        return step % train.log_interval_steps == 0 or step == train.steps

    def _read_step(self, loader: Loader) -> tuple[list[Tensor], Cursor, int]:
        """A rank's micro-batches of the next step, the cursor after the step, and the step's
        target tokens over all ranks."""
        at = Cursor(self.progress.consumed_samples)
        skipped = self.progress.health.skipped_samples
        batches, cursor = loader.step(at, skipped)
        planned = len(loader.samples(at, skipped)) * self.job.spec.data.seq_len
        return batches, cursor, planned

    def _beat(self, phase: str) -> None:
        self.job.runtime.heartbeat.beat(phase, self.progress.step)
        self.profiler.phase(phase, self.progress.step)

    def _report(self, attempt: Attempt, stop_requested: int) -> Report:
        """What this rank brings to the barrier."""
        scale, result = self.progress.loss_scale or 1.0, attempt.result
        return Report(
            loss_sum=float(result.loss_sum),
            target_tokens=result.target_tokens,
            grad_square_sum=self.job.grad_square_sum() / scale**2,
            stop_requested=stop_requested,
            save_requested=self.checkpointer.requested,
            step_seconds=time.perf_counter() - attempt.began,
            data_wait_seconds=attempt.waited,
            exposed_seconds=self.job.runtime.comm_monitor.exposed_seconds,
            expert_rows=result.expert_rows,
            expert_seconds=result.expert_seconds,
            bad_layer=bad_layer(self.job.moe_layers, result.routing),
            data_checksum=data_checksum(attempt.batches) if self.job.dims.reads_first else 0.0,
            regroup_wanted=self.wants_meeting(),
        )

    def _commit(self, facts: StepFacts, attempt: Attempt) -> None:
        """Update parameters and counters."""
        decision = facts.decision
        job, clip = self.job, self.job.spec.optimizer.clip_norm
        factor = attempt.planned / decision.target_tokens
        if clip and decision.grad_norm > clip:
            factor *= clip / decision.grad_norm
        scale_gradients(job.model, factor / (decision.loss_scale or 1.0))
        before, health = self.progress, self.watch.after_commit()
        factor_of_rate = health.lr_factor_at(before.step + 1)
        set_lr(job.optimizer, learning_rate(job.spec, before.step) * factor_of_rate)
        job.optimizer.step()
        if job.compressed is not None:
            job.compressed.commit()
        if self.first_step is not None:
            self.first_step.see(before.step + 1)
        first = before.train_loss_first
        progress = replace(
            before,
            step=before.step + 1,
            tokens_seen=before.tokens_seen + decision.target_tokens,
            consumed_samples=attempt.cursor.sample_index,
            train_loss_first=decision.loss if first is None else first,
            train_loss_last=decision.loss,
            validation=None,
            health=health,
        )
        self.progress = progress.after_commit(GROWTH_STEPS)
        self.committed = decision, attempt
        self.skipped = 0

    def _count(self, facts: StepFacts, attempt: Attempt) -> None:
        """Add a committed step to the interval, and move biases by the step's loads."""
        self.interval.add_reports(facts.reports)
        self.interval.add_mtp(attempt.result.mtp_loss_sums_K, attempt.mtp)
        if attempt.result.routing is not None:
            self._balance(attempt.result.routing, facts.reports)

    def publish_newest(self) -> None:
        """Publish the newest committed step, which the end of an epoch has kept from the log."""
        if self.committed is not None:
            decision, attempt = self.committed
            attempt.end(attempt.traffic)
            self._publish_commit(decision, attempt)

    def _publish_commit(self, decision: Decision, attempt: Attempt) -> None:
        """Publish a committed step, and add the step to the interval."""
        job, tokens, seconds = self.job, decision.target_tokens, attempt.seconds
        planned, traffic = attempt.planned, attempt.traffic
        self.interval.micro_batches = len(attempt.batches)
        self.progress = replace(self.progress, train_seconds=self.progress.train_seconds + seconds)
        groups = self.interval.add(tokens, planned, seconds=seconds, traffic=traffic)
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
                samples=planned // job.spec.data.seq_len,
                padding_tokens=planned - tokens,
                data_checksum=decision.data_checksum,
                seconds=seconds,
                data_wait_seconds=decision.data_wait_seconds,
                rank_0_data_wait_seconds=attempt.waited,
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

    def _balance(self, routing: RoutingStats, reports: Reports) -> None:
        """Move biases by the whole step's loads."""
        self.interval.add_routing(routing, reports.column("expert_rows"))
        moe = self.job.spec.moe
        if moe is None:
            return
        if moe.moves_biases:
            by_layer = routing.everywhere_LE
            if moe.balancing_traits.margin_bins:
                by_layer = routing.margins_everywhere_LEM
            for row, router in zip(self.job.router_rows, self.job.routers, strict=True):
                # A router that is frozen by [tune] chooses as it did.
                if any(parameter.requires_grad for parameter in router.parameters()):
                    router.update_bias(by_layer[row])
        if moe.aux_loss_scope == "previous_step":
            everywhere_LE = routing.everywhere_LE
            self.job.set_step_counts(everywhere_LE)
            self.progress = replace(self.progress, expert_counts=everywhere_LE.tolist())

    def _skip(self, decision: Decision, attempt: Attempt) -> None:
        """Publish a step that changed nothing, and do what the playbook or a part says about it."""
        verdict, before, cursor = self.watch.verdict, self.progress, attempt.cursor
        acts = verdict is not None and not verdict.keeps_update
        wished = not acts and decision.skipped_for is not None
        self.skipped = 0 if acts or wished else self.skipped + (not decision.overflow)
        leaves_out = wished or (verdict is not None and acts and verdict.leaves_out_step)
        collective_seconds, collective_bytes = seconds_and_bytes(attempt.traffic)
        self.job.events.publish(
            StepSkipped(
                step=before.step + 1,
                loss=decision.loss,
                grad_norm=decision.grad_norm,
                seconds=attempt.seconds,
                data_wait_seconds=decision.data_wait_seconds,
                rank_0_data_wait_seconds=attempt.waited,
                reason=decision.reason,
                why=decision.why,
                overflow=decision.overflow,
                bad_router=decision.bad_router,
                skipped_samples=(
                    (before.consumed_samples, cursor.sample_index) if leaves_out else None
                ),
                loss_scale=decision.loss_scale,
                collective_seconds=collective_seconds,
                collective_bytes=collective_bytes,
            )
        )
        if verdict is not None and acts:
            # A run that stops here saves nothing: what came just before is suspect, and must not
            # take the place of an older state that is not.
            self.progress = self.watch.act(verdict, before, cursor, self.checkpointer)
            if verdict.goes_back:
                self.interval = IntervalStats(self.progress.consumed_samples)
        elif wished:
            memory = before.health if verdict is None else verdict.memory
            health = after_skip(memory, before.consumed_samples, cursor.sample_index)
            self.progress = replace(before, health=health, consumed_samples=cursor.sample_index)

    @property
    def _uses_loads(self) -> bool:
        """Whether a committed step needs the loads of all ranks."""
        moe = self.job.spec.moe
        if moe is None:
            return False
        by_loads = moe.moves_biases and not moe.balancing_traits.margin_bins
        return by_loads or moe.aux_loss_scope == "previous_step"

    def mfu(self, tokens: int, seconds: float) -> float:
        """Model FLOPs utilization (Chowdhery et al., arXiv 2204.02311, appendix B)."""
        return self.flops_per_token * tokens / seconds / self.peak_flops

    def end_interval(self, decision: Decision) -> None:
        """Publish what the steps since the last interval gathered; every rank must call."""
        interval, self.interval = self.interval, IntervalStats(self.progress.consumed_samples)
        self.job.events.publish(
            interval.event(
                self.job,
                self.progress,
                loss=decision.loss,
                grad_norm=decision.grad_norm,
                mfu=self.mfu(interval.tokens, interval.seconds),
            )
        )
        publish_fetches(
            self.job.corpora.cache, self.job.runtime, self.job.events, self.progress.step
        )

    def validate(self, stop: StopRequest | None = None) -> None:
        """Score some held-out sequences; every rank must call. Where a rank is asked to stop
        meanwhile, nothing is published, and the next step's barrier stops the run."""
        count = self.job.spec.eval.sequences
        try:
            result = evaluate(self.job, count, step=self.progress.step, stop=stop)
        except StoppedEvaluationError:
            return
        finite = result.loss if math.isfinite(result.loss) else None
        self.progress = replace(self.progress, validation=finite)
        self.job.events.publish(
            Evaluated(
                step=self.progress.step,
                loss=result.loss,
                bits_per_byte=result.bits_per_byte,
                bits_per_byte_by_set=result.bits_per_byte_by_set,
            )
        )
