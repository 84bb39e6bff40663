"""What the trainer does about the playbook's verdicts.

Legend: L MoE layers, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace

import ckpt
from pretrain.checkpoint import Checkpointer, go_back
from pretrain.data import Cursor
from pretrain.errors import HealthError
from pretrain.job import Job
from pretrain.observe import HealthAction, HealthSignal
from pretrain.parallelize import RoutingStats
from pretrain.parts.playbook import (
    HealthMemory,
    Seen,
    Verdict,
    after_commit,
    after_going_back,
    after_skip,
    judge,
    routers_are_checked,
)
from pretrain.parts.step import Action, Decision, SkipReason
from pretrain.state import Progress

_REPORT = "health.json"


class HealthWatch:
    """Judges each step at the barrier, and acts. Every rank judges and acts alike.

    Args:
        job: the run.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.config = job, job.spec.health
        self._seen: Seen | None = None
        self.verdict: Verdict | None = None
        """Of the step that is being taken; None after an overflow of float16."""

    def judged(
        self, decision: Decision, progress: Progress, skipped: int, routing: RoutingStats | None
    ) -> Decision:
        """The decision of the barrier, with the verdict of the playbook; every rank must call.

        Args:
            decision: of the barrier.
            progress: before the step.
            skipped: how many times in a row the step before this try was not finite.
            routing: what this rank's routers did in the step.
        """
        self.verdict = None
        if decision.overflow:
            return decision
        step = progress.step + 1
        finite = decision.action is Action.COMMIT
        self._seen = Seen(
            step=step,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            finite=finite,
            why_not_finite="" if finite else decision.why,
            attempts=0 if finite else skipped + 1,
            loads_LE=self._loads(step, routing),
        )
        verdict = judge(self.config, progress.health, self._seen)
        for signal in verdict.signals:
            self.job.events.publish(
                HealthSignal(
                    step=progress.step,
                    rule=signal.rule,
                    observed=signal.observed,
                    usual=signal.usual,
                    limit=signal.limit,
                    text=signal.text,
                )
            )
        if verdict.action in ("report", "lower_lr"):
            self._publish_action(verdict, progress)
        self.verdict = verdict
        if verdict.keeps_update:
            return decision
        cause = verdict.cause
        of_finite = None if cause.rule == "not_finite" else SkipReason(cause.rule, cause.text)
        return replace(decision, action=Action.SKIP, skipped_for=of_finite)

    def _loads(self, step: int, routing: RoutingStats | None) -> Sequence[Sequence[int]] | None:
        """Assignments of the step by layer and expert, over all ranks, where they are checked."""
        if routing is None or not routers_are_checked(self.config, step):
            return None
        loads: list[list[int]] = routing.everywhere_LE.tolist()
        return loads

    def after_commit(self) -> HealthMemory:
        """The memory after the step was committed."""
        assert self.verdict is not None
        assert self._seen is not None
        return after_commit(self.config, self.verdict, self._seen)

    def act(
        self, verdict: Verdict, progress: Progress, cursor: Cursor, checkpointer: Checkpointer
    ) -> Progress:
        """Leave samples out, go back, or stop, as the verdict says; every rank must call.

        Args:
            verdict: of a step that was not committed.
            progress: before the step.
            cursor: after the step's samples.
            checkpointer: what saves the run.

        Returns:
            The counters from which the run goes on.

        Raises HealthError where the verdict is to stop, or where there is no checkpoint to go back
        to.
        """
        stop = cursor.sample_index
        if verdict.action == "stop":
            self._publish_action(verdict, progress)
            raise self._stopped(verdict, progress, checkpointer)
        if not verdict.goes_back:
            memory = after_skip(verdict.memory, progress.consumed_samples, stop)
            skipped = (progress.consumed_samples, stop)
            self._publish_action(verdict, progress, skipped=skipped)
            return replace(progress, health=memory, consumed_samples=stop)

        def remember(then: Progress) -> HealthMemory:
            start = self._first_left_out(then, verdict.memory, progress.step + 1)
            self._publish_action(verdict, progress, to_step=then.step, skipped=(start, stop))
            return after_going_back(after_skip(verdict.memory, start, stop), then.health)

        count = self.config.go_back_checkpoints
        restored = go_back(self.job, checkpointer, count, remember)
        if restored is None:
            raise self._stopped(
                verdict, progress, checkpointer, "there is no checkpoint to go back to; "
            )
        return restored

    def _first_left_out(self, then: Progress, memory: HealthMemory, step: int) -> int:
        """The first sample that is left out where the run goes back to ``then`` from ``step``."""
        cursor, loader = then.consumed_samples, self.job.loader
        for _ in range(step - self.config.skip_steps - then.step):
            cursor = loader.samples(Cursor(cursor), memory.skipped_samples)[-1] + 1
        return cursor

    def _publish_action(
        self,
        verdict: Verdict,
        progress: Progress,
        *,
        to_step: int | None = None,
        skipped: tuple[int, int] | None = None,
    ) -> None:
        assert verdict.action is not None
        cause, memory, lowers = verdict.cause, verdict.memory, verdict.lowers_lr
        self.job.events.publish(
            HealthAction(
                step=progress.step,
                rule=cause.rule,
                action=verdict.action,
                occurrence=sum(o.rule == cause.rule for o in memory.occurrences),
                to_step=to_step,
                skipped_samples=skipped,
                lr_factor=memory.lr_factor if lowers else None,
                lr_until_step=memory.lr_until_step if lowers else None,
                text=_in_words(verdict, to_step, skipped),
            )
        )

    def _stopped(
        self, verdict: Verdict, progress: Progress, checkpointer: Checkpointer, why: str = ""
    ) -> HealthError:
        way_back = checkpointer.way_back()
        self.job.runtime.first(lambda: self._write_report(verdict, progress))
        return HealthError(f"step {progress.step + 1} {_of_step(verdict)}; {why}{way_back}")

    def _write_report(self, verdict: Verdict, progress: Progress) -> None:
        """Write what led to the stop to RUN_DIR/health.json."""
        spec = self.job.spec
        report = {
            "step": progress.step + 1,
            "signals": [asdict(signal) for signal in verdict.signals],
            "action": verdict.action,
            "memory": asdict(verdict.memory),
            "checkpoint_path": str(spec.checkpoint_path),
            "committed_steps": ckpt.committed_steps(spec.checkpoint_path),
        }
        try:
            (spec.run_path / _REPORT).write_text(json.dumps(report, indent=1) + "\n")
        except OSError:
            return  # the error that ends the run says the most important part


def _of_step(verdict: Verdict) -> str:
    text = verdict.cause.text
    return text if verdict.cause.rule == "not_finite" else f"diverges: {text}"


def _in_words(verdict: Verdict, to_step: int | None, skipped: tuple[int, int] | None) -> str:
    parts = []
    if to_step is not None:
        parts.append(f"going back to step {to_step}")
    if skipped is not None:
        parts.append(f"samples {skipped[0]} to {skipped[1] - 1} are left out")
    if verdict.lowers_lr:
        memory = verdict.memory
        parts.append(
            f"the learning rate is multiplied by {memory.lr_factor:g} up to step "
            f"{memory.lr_until_step}"
        )
    if verdict.action == "stop":
        parts.append("the run stops")
    return "; ".join(parts) or "nothing is done but this report"
