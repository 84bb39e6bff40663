"""What is done about ranks that are slow as a whole, in stages.

1. Straggler-aware capacity gives a slow rank's experts fewer assignments
   (:class:`pretrain.parts.capacity.CapacityBalance`).
2. A slow rank computes fewer micro-batches of the same global batch (:func:`pretrain.data.divide`).
3. A rank that stays slow is reported for replacement, as an event of stage 3. With
   ``stragglers.replace`` its machine is put on the exclude list, and the run starts again without
   the machine.

Every rank decides the same from the reports of the step barrier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pretrain.data import Cursor
from pretrain.job import Job
from pretrain.observe import (
    MicroBatchesPlanned,
    StragglerEnded,
    StragglerFound,
    StragglerGain,
)
from pretrain.parts.stragglers.rule import GainMeter, Straggler
from pretrain.runtime import starts_again_without_machine
from pretrain.train import Report, exclude_machine

CAPACITY, MICRO_BATCHES, REPLACEMENT = 1, 2, 3
"""The stages; 0 stands for a slow rank about which nothing can be done."""


class StragglerStages:
    """Finds slow ranks, divides micro-batches anew, and publishes what was seen, done and gained.

    Args:
        job: the run on this rank.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.meter = job, GainMeter()
        self.starts_again = False
        """Whether the run must end after this step, for a start without a slow machine."""

    def after(
        self,
        step: int,
        reports: Sequence[Report],
        *,
        cursor: Cursor,
        seconds: float,
        replanned: bool,
    ) -> None:
        """Take in a committed step.

        Args:
            step: the committed step.
            reports: of all ranks, in rank order.
            cursor: the first sample of the next step.
            seconds: of the slowest rank, equal on all ranks.
            replanned: whether capacity has a new plan from the next step on.
        """
        self._measure(step, seconds, cursor)
        if replanned:
            self.meter.begin(CAPACITY)
        stragglers, publish = self.job.stragglers, self.job.events.publish
        if stragglers is None:
            return
        findings = stragglers.after(
            step,
            [report.target_tokens for report in reports],
            [report.expert_rows for report in reports],
            [report.step_seconds - report.exposed_seconds for report in reports],
        )
        for one in findings.ended:
            publish(
                StragglerEnded(step=step, rank=one.rank, speed=one.speed, since_step=one.since_step)
            )
        if findings.changed and self._may_divide:
            self._divide(step, cursor)
        for one in findings.found:
            stage, action = self._answer(one, cursor)
            self._publish_found(step, one, stage, action)
        for one in findings.lasting:
            self._publish_found(step, one, REPLACEMENT, self._replace(one))

    def _replace(self, one: Straggler) -> str:
        """Take the machine of a slow rank out of the run, where the spec says so and the launch can
        go on without the machine; what is done, for people. Every rank must call."""
        job = self.job
        machine = job.machines[one.rank]
        left = len(set(job.machines) - {machine})
        if not job.spec.stragglers.replace or not left:
            return "still slow: replace its machine, or take it out of the run"
        if not job.runtime.from_first(lambda: int(starts_again_without_machine(left))):
            return f"still slow: this launch needs {machine}; replace the machine"
        why = f"rank {one.rank} had {one.speed:.0%} of the speed of the other ranks"
        if not exclude_machine(job, machine, why):
            return f"still slow: {machine} cannot be put on the exclude list"
        self.starts_again = True
        return f"still slow: {machine} is excluded, and the run starts again without it"

    @property
    def _may_divide(self) -> bool:
        return self.job.spec.stragglers.rebalance and self.job.topology.pp == 1

    def _publish_found(self, step: int, one: Straggler, stage: int, action: str) -> None:
        self.job.events.publish(
            StragglerFound(
                step=step,
                rank=one.rank,
                speed=one.speed,
                z=one.z,
                since_step=one.since_step,
                stage=stage,
                action=action,
            )
        )

    def _answer(self, one: Straggler, cursor: Cursor) -> tuple[int, str]:
        """The stage that answers a slow rank, and what it does, for people."""
        job, stragglers = self.job, self.job.stragglers
        assert stragglers is not None
        why = ""
        if self._may_divide:
            total, at = job.loader.num_micro_batches(cursor), stragglers.dp_rank(one.rank)
            division = job.loader.division
            counts = division.counts(total)
            if counts[at] < replace(division, speeds=None).counts(total)[at]:
                return MICRO_BATCHES, f"the rank computes {counts[at]} of {total} micro-batches"
            why = (
                f"a step of {total} micro-batches on {len(counts)} ranks has no division that "
                f"saves {job.spec.stragglers.min_gain:.0%} of its time"
            )
        elif job.spec.stragglers.rebalance:
            why = "micro-batches are not divided anew with parallel.pp above 1"
        else:
            why = "stragglers.rebalance is false"
        if job.balance is not None:
            return CAPACITY, f"the rank's experts get fewer assignments; {why}"
        return 0, f"nothing is done: {why}"

    def _divide(self, step: int, cursor: Cursor) -> None:
        """Divide the micro-batches of the coming steps by the speeds of now."""
        job, stragglers = self.job, self.job.stragglers
        assert stragglers is not None
        total, speeds = job.loader.num_micro_batches(cursor), stragglers.dp_speeds
        before = job.loader.division.counts(total)
        self._set_speeds(step, cursor, None if len(set(speeds)) == 1 else speeds)
        if job.loader.division.counts(total) != before:
            self.meter.begin(MICRO_BATCHES)

    def _set_speeds(self, step: int, cursor: Cursor, speeds: tuple[float, ...] | None) -> None:
        job, stragglers = self.job, self.job.stragglers
        assert stragglers is not None
        stragglers.division_speeds = speeds
        job.divide_micro_batches()
        division, total = job.loader.division, job.loader.num_micro_batches(cursor)
        job.events.publish(
            MicroBatchesPlanned(
                step=step,
                counts=list(division.counts(total)),
                relative_speeds=list(speeds or [1.0] * division.ranks),
                predicted_gain=division.gain(total),
            )
        )

    def _measure(self, step: int, seconds: float, cursor: Cursor) -> None:
        """Publish what answers have gained; take back a division that made steps longer."""
        for gain in self.meter.after(seconds):
            divided = (
                gain.stage == MICRO_BATCHES
                and self.job.stragglers is not None
                and self.job.stragglers.division_speeds is not None
            )
            worse = divided and gain.seconds_after > gain.seconds_before
            self.job.events.publish(
                StragglerGain(
                    step=step,
                    stage=gain.stage,
                    seconds_before=gain.seconds_before,
                    seconds_after=gain.seconds_after,
                    kept=not worse,
                )
            )
            if worse:
                self._set_speeds(step, cursor, None)
