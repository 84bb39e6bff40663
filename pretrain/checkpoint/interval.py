"""When to save: after a number of steps or minutes, or as often as failures make a save worth."""

from __future__ import annotations

import time
from collections.abc import Callable

from pretrain.checkpoint.failures import DEVICE_HOURS_PER_FAILURE, optimal_interval
from pretrain.observe import History
from pretrain.spec import CheckpointConfig

_FIRST_STALL_SECONDS = 1.0  # before any save was timed


class SaveClock:
    """Decides when a save is due.

    Every rank counts steps, and all ranks count the same. Time is read on rank 0 only, and rank 0's
    answer reaches the other ranks through the step barrier.

    Args:
        config: the interval, in steps, in minutes, or ``auto``.
        world: the number of ranks, by which the failure rate of devices is multiplied.
        history: failures of earlier starts of the run.
        now: a clock in seconds.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        world: int,
        history: History,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.world, self.history, self._now = config, world, history, now
        self._began = self._last = now()
        self.stall_seconds = _FIRST_STALL_SECONDS
        self._write_seconds: dict[str, float] = {}

    @property
    def seconds_between_failures(self) -> float:
        """The expected time between failures: (T + T0) / (failures + 1).

        T is the observed time; T0, the prior's mean time, counts as one failure.
        """
        observed = self.history.seconds + self._now() - self._began
        prior = DEVICE_HOURS_PER_FAILURE * 3600 / self.world
        return (observed + prior) / (self.history.failures + 1)

    @property
    def interval_seconds(self) -> float | None:
        """Seconds between saves; None where the spec counts steps."""
        if self.config.interval_minutes is not None:
            return 60 * self.config.interval_minutes
        if self.config.interval_steps != "auto":
            return None
        best = optimal_interval(self.stall_seconds, self.seconds_between_failures)
        # A save that begins while the one before is still being written has to wait.
        return max(best, *self._write_seconds.values(), 0.0)

    def is_time(self) -> bool:
        """Whether the interval has passed, by this process's clock."""
        interval = self.interval_seconds
        return interval is not None and self._now() - self._last >= interval

    def due(self, step: int, asked: bool) -> bool:
        """Whether to save after ``step``. ``asked``: whether any rank requested a save."""
        steps = self.config.steps_between
        return asked or (steps is not None and step % steps == 0)

    def wrote(self, tier: str, seconds: float) -> None:
        """Note how long a tier's part of a save took; an older, longer time decays by half."""
        self._write_seconds[tier] = max(seconds, self._write_seconds.get(tier, 0.0) / 2)

    def saved(self, stall_seconds: float) -> None:
        """Note that a save has begun, and how many seconds training waited for the copy."""
        self._last, self.stall_seconds = self._now(), stall_seconds
