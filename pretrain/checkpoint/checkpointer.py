"""A run's checkpoints while the run trains: when, where to, and what has become of each save."""

from __future__ import annotations

from functools import partial

import ckpt
from ckpt import AsyncCheckpointer, CheckpointError, SaveEvent
from ckpt.errors import OtherRankError
from pretrain.checkpoint.contents import save_info
from pretrain.checkpoint.interval import SaveClock
from pretrain.checkpoint.progress import CheckpointProgress, way_back
from pretrain.checkpoint.rolling_back import roll_back
from pretrain.checkpoint.run_id import BEGINNING
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.observe import (
    CheckpointCommitted,
    CheckpointFailed,
    History,
    SaveBegun,
    SaveIntervalChosen,
)
from pretrain.parts.playbook import HealthMemory
from pretrain.runtime import StopRequest
from pretrain.state import Progress


class Checkpointer:
    """Begins saves when they are due, and publishes what becomes of them.

    Args:
        job: what is saved.
        writer: the trainer's side of this rank's writer process.
        stop: requests of signals, among them requests to save.
        history: failures of earlier starts.
        progress: the checkpoints that there are.
    """

    def __init__(
        self,
        job: Job,
        writer: AsyncCheckpointer,
        *,
        stop: StopRequest,
        history: History,
        progress: CheckpointProgress,
    ) -> None:
        self.job, self.writer, self.stop, self.progress = job, writer, stop, progress
        self.root = job.spec.checkpoint_path
        self.clock = SaveClock(job.spec.checkpoint, job.runtime.world, history)
        self._saves = 0
        self._failures: dict[str, int] = {}
        self._error = ""
        self._last_step: int | None = None

    @property
    def requested(self) -> bool:
        """What this rank brings to the barrier: whether to save after this step."""
        return self.stop.save_requested or (self.job.runtime.is_first and self.clock.is_time())

    def due(self, step: int, *, requested: bool, last: bool) -> bool:
        """Whether to save after ``step``, which no save was begun of.

        Args:
            step: the newest committed step.
            requested: whether any rank brought a request to the barrier.
            last: whether the run ends after the step, which always saves.
        """
        return step > self.progress.begun and (last or self.clock.due(step, requested))

    def save(self, progress: Progress, last: bool) -> None:
        """Begin a checkpoint; every rank must call. The ``last`` of a run goes to all tiers."""
        step, every = progress.step, self.job.spec.checkpoint.tiers.shared_interval
        known = self.progress
        self.stop.save_requested = False
        self._saves += 1
        # A resume from nodes' tiers only is first made safe.
        unsafe = self._saves == 1 and known.restored > known.shared_begun
        shared = last or self._saves % every == 0 or unsafe
        names = [
            tier.name
            for tier in self.writer.tiers
            if (shared if tier.name == "shared" else step > known.begun)
        ]
        known.begun = step
        if shared:
            known.shared_begun = step
        try:
            stall = self.writer.save(
                save_info(self.job, progress), self.job.checkpoint_arrays(), names
            )
        except CheckpointError as error:
            stall = self.clock.stall_seconds  # a failed save does not say what a save costs
            self._fail("shared", step, str(error))
        self.clock.saved(stall)
        publish = self.job.events.publish
        publish(SaveBegun(step=step, stall_seconds=stall, tiers=[str(name) for name in names]))
        if self.job.spec.checkpoint.interval_steps == "auto":
            publish(
                SaveIntervalChosen(
                    step=step,
                    seconds=self.clock.interval_seconds,
                    stall_seconds=stall,
                    failures=self.clock.history.failures,
                    seconds_between_failures=self.clock.seconds_between_failures,
                )
            )

    def poll(self) -> None:
        """Publish an event for each save that was committed or failed since the last call."""
        try:
            events = self.writer.poll()
        except CheckpointError as error:
            self._fail("shared", -1, str(error))
            return
        for event in events:
            self._publish(event)

    def wait(self) -> None:
        """Wait until every save that was begun is committed or has failed."""
        try:
            for event in self.writer.wait():
                self._publish(event)
        except CheckpointError as error:
            self._fail("shared", self.progress.begun, str(error))

    def settle(self) -> None:
        """Wait until no rank's writer process has anything to write; every rank must call."""
        self.wait()
        self.job.runtime.agree(True)

    def way_back(self) -> str:
        """What to do after a run that cannot go on; every rank must call, and waits for saves."""
        self.wait()
        return way_back(self.job.runtime, self.root)

    def leave_verified(self, verified_step: int | None) -> int | None:
        """Leave only checkpoints of ``verified_step`` and before; every rank must call.

        Saves that were begun are waited for. Newer checkpoints are moved to ``away/``, and those in
        nodes' memory and on their disks are not taken, as after ``convoy prepare --load-step``.
        This run cannot go on afterwards. Where ``verified_step`` is None, every checkpoint is
        verified, and nothing is moved.

        Returns:
            The step after which the next start begins, 0 for the beginning; None where the folder
            has checkpoints, and none of them is of ``verified_step`` or before: nothing is moved
            then.

        Raises InputError where the folder cannot be changed.
        """
        runtime, root = self.job.runtime, self.root
        self.settle()

        def leave() -> int:
            steps = ckpt.committed_steps(root)
            if verified_step is None:
                return max(steps, default=0)
            step = max((s for s in steps if s <= verified_step), default=BEGINNING)
            if step == BEGINNING and verified_step > 0:
                return BEGINNING
            self.roll_back(step)
            return max(step, 0)

        step = runtime.from_first(leave)
        return None if step == BEGINNING else step

    def roll_back(self, step: int, health: HealthMemory | None = None) -> None:
        """See :func:`pretrain.checkpoint.rolling_back.roll_back`; for rank 0.

        Raises InputError where the folder cannot be changed.
        """
        try:
            roll_back(self.root, step, partial(self.job.events.note, step=step), health)
        except OSError as error:
            raise InputError(
                f"checkpoint.path ({self.root}) cannot be changed: {error.strerror}"
            ) from None

    def finish(self, progress: Progress) -> None:
        """Wait for what was begun; every rank must call. A last step that only nodes' tiers have is
        saved in the shared tier too.

        Raises CheckpointError on every rank where the last step is not in the shared tier; rank 0,
        which commits, gives the reason.
        """
        self._last_step = progress.step
        if progress.step > self.progress.shared_begun:
            self.save(progress, last=True)
        self.wait()
        runtime, spec = self.job.runtime, self.job.spec
        if not runtime.agree(self._failures.get("shared", 0) == 0):
            what = f"checkpoint of step {progress.step} in {spec.checkpoint_path} is not saved"
            if not runtime.is_first:
                raise OtherRankError(what)
            raise CheckpointError(f"{what}: {self._error or 'another rank could not write'}")

    def _publish(self, event: SaveEvent) -> None:
        assert event.tier is not None
        if event.what == "failed":
            self._fail(event.tier, event.step, event.error, told=event.told)
            return
        self._failures[event.tier] = 0
        self.clock.wrote(event.tier, event.write_seconds)
        if event.what != "committed" or not self.job.runtime.is_first:
            return
        where = next(tier.location for tier in self.writer.tiers if tier.name == event.tier)
        self.job.events.publish(
            CheckpointCommitted(
                step=event.step,
                tier=event.tier,
                seconds=event.seconds,
                write_seconds=event.write_seconds,
                bytes_written=event.bytes_written,
                bytes_linked=event.bytes_linked,
                retries=event.retries,
                path=ckpt.open_store(where).where(ckpt.format.manifest_key(event.step)),
            )
        )

    def _fail(self, tier: str, step: int, error: str, *, told: bool = False) -> None:
        self._error, is_first = error, self.job.runtime.is_first
        self._failures[tier] = self._failures.get(tier, 0) + 1
        self.job.events.publish(
            CheckpointFailed(
                step=step,
                tier=tier,
                error=error,
                in_a_row=self._failures[tier],
                told=told or (tier == "shared" and step == self._last_step and is_first),
            )
        )
