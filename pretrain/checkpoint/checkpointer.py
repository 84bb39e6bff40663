"""A run's checkpoints while it trains: where to, when, and what has become of them."""

from __future__ import annotations

import ckpt
from ckpt import CheckpointError, Event, Saver
from pretrain.checkpoint.contents import checkpoint_arrays, save_info
from pretrain.checkpoint.interval import SaveClock
from pretrain.job import Job
from pretrain.observe import History, Metrics, RunLog, complain, say
from pretrain.runtime import StopRequest
from pretrain.state import Progress

_FAILURES_IN_A_ROW = 3  # until a tier is said to be out of order


class Saves:
    """Asks for saves when they are due, and tells what became of them."""

    def __init__(
        self,
        job: Job,
        saver: Saver,
        stop: StopRequest,
        log: RunLog,
        metrics: Metrics,
        history: History,
        restored: int,
        shared_step: int,
    ) -> None:
        self.job, self.saver, self.stop = job, saver, stop
        self.log, self.metrics = log, metrics
        self.clock = SaveClock(job.spec.checkpoint, job.runtime.world, history)
        self.count = 0
        self.shared = shared_step
        """The newest step that the shared tier has, or was given."""
        self.restored = self.newest = restored
        """The step that the run began after, and the newest that was saved since."""
        self._failed: dict[str, int] = {}
        self._error = ""

    @property
    def requested(self) -> bool:
        """What this rank brings to the barrier: whether to save after this step."""
        return self.stop.save_requested or (self.job.runtime.is_first and self.clock.is_time())

    def save(self, progress: Progress, last: bool) -> None:
        """Begin a checkpoint; every rank must call. The ``last`` of a run goes to all tiers."""
        job, every = self.job, self.job.spec.checkpoint.shared_every
        self.stop.save_requested = False
        self.count += 1
        # A resume from nodes' tiers alone is first made safe.
        due = last or self.count % every == 0 or (self.count == 1 and self.restored > self.shared)
        names = [
            tier.name
            for tier in self.saver.tiers
            if (due if tier.name == "shared" else progress.step > self.newest)
        ]
        self.newest = progress.step
        if due:
            self.shared = progress.step
        try:
            stall = self.saver.save(save_info(job, progress), checkpoint_arrays(job), names)
        except CheckpointError as error:
            stall = self.clock.stall_seconds  # it says nothing of what a save costs
            self._tell_failure(Event(what="failed", tier="shared", step=progress.step), str(error))
        self.clock.saved(stall)
        self.metrics.record_stall(stall)
        self.log.write("save", step=progress.step, stall_seconds=stall, tiers=names)
        if self.job.spec.checkpoint.interval_steps == "auto":
            self.log.write(
                "save_interval",
                step=progress.step,
                seconds=self.clock.interval_seconds,
                stall_seconds=stall,
                failures=self.clock.history.failures,
                seconds_between_failures=self.clock.seconds_between_failures,
            )

    def poll(self) -> None:
        """Tell what has become of saves since the last look."""
        try:
            events = self.saver.poll()
        except CheckpointError as error:
            self._tell_failure(Event(what="failed", tier="shared"), str(error))
            return
        for event in events:
            self._tell(event)

    def finish(self, progress: Progress) -> None:
        """Wait for what was begun; every rank must call. A last step that nodes alone have is
        saved where all share it.

        Raises CheckpointError on every rank where the last one is not in the shared tier.
        """
        step = progress.step
        if step > self.shared:
            self.save(progress, last=True)
        try:
            for event in self.saver.wait():
                self._tell(event)
        except CheckpointError as error:
            self._tell_failure(Event(what="failed", tier="shared", step=step), str(error))
        runtime, spec = self.job.runtime, self.job.spec
        good = self._failed.get("shared", 0) == 0
        if not runtime.agree(good):
            why = self._error or "another rank could not write its part"
            raise CheckpointError(
                f"checkpoint of step {step} in {spec.checkpoint_path} is not saved: {why}"
            )

    def _tell(self, event: Event) -> None:
        assert event.tier is not None
        if event.what == "failed":
            self._tell_failure(event, event.error)
            return
        self._failed[event.tier] = 0
        self.clock.wrote(event.tier, event.write_seconds)
        if event.what != "committed" or not self.job.runtime.is_first:
            return
        self.metrics.record_save(event)
        where = next(tier.location for tier in self.saver.tiers if tier.name == event.tier)
        self.log.write(
            "checkpoint",
            step=event.step,
            tier=event.tier,
            seconds=event.seconds,
            write_seconds=event.write_seconds,
            bytes_written=event.bytes_written,
            bytes_linked=event.bytes_linked,
            retries=event.retries,
            path=ckpt.manifest_name(where, event.step),
        )
        if event.tier == "shared":
            say(f"checkpoint of step {event.step} committed in {event.seconds:.2f} s")

    def _tell_failure(self, event: Event, error: str) -> None:
        tier, runtime = event.tier or "shared", self.job.runtime
        self._error = error
        self._failed[tier] = self._failed.get(tier, 0) + 1
        self.log.write("checkpoint_failed", step=event.step, tier=tier, error=error)
        which = f"checkpoint of step {event.step}" if event.step >= 0 else "a checkpoint"
        complain(f"rank {runtime.rank}: {which} is not in tier {tier}: {error}")
        if self._failed[tier] == _FAILURES_IN_A_ROW:
            complain(
                f"rank {runtime.rank}: tier {tier} has failed {_FAILURES_IN_A_ROW} times in a row; "
                f"training goes on"
            )
