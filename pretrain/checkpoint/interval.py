"""When to save: every so many steps or minutes, or as often as failures make it worth."""

from __future__ import annotations

import time
from collections.abc import Callable

from pretrain.observe import History
from pretrain.plan import DEVICE_HOURS_PER_FAILURE, optimal_interval
from pretrain.spec import CheckpointConfig

_FIRST_STALL_SECONDS = 1.0  # before any save was timed


class SaveClock:
    """Whether a save is due. Steps are counted alike on all ranks; of time the first rank's clock
    alone is asked, at the step barrier."""

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
        """The prior's mean counts as one failure: (T + T0) / (failures + 1)."""
        observed = self.history.seconds + self._now() - self._began
        prior = DEVICE_HOURS_PER_FAILURE * 3600 / self.world
        return (observed + prior) / (self.history.failures + 1)

    @property
    def interval_seconds(self) -> float | None:
        """Between saves; None where steps are counted."""
        if self.config.interval_minutes is not None:
            return 60 * self.config.interval_minutes
        if self.config.interval_steps != "auto":
            return None
        best = optimal_interval(self.stall_seconds, self.seconds_between_failures)
        # One that is still being written would be waited for.
        return max(best, *self._write_seconds.values(), 0.0)

    def is_time(self) -> bool:
        """Whether the clock says so, on the rank that is asked."""
        interval = self.interval_seconds
        return interval is not None and self._now() - self._last >= interval

    def due(self, step: int, asked: bool) -> bool:
        """Whether to save after ``step``; the same on all ranks. ``asked`` is what the barrier
        says."""
        steps = self.config.steps_between
        return asked or (steps is not None and step % steps == 0)

    def wrote(self, tier: str, seconds: float) -> None:
        """A tier's part of a save has taken so long; what was slow once is forgotten slowly."""
        self._write_seconds[tier] = max(seconds, self._write_seconds.get(tier, 0.0) / 2)

    def saved(self, stall_seconds: float) -> None:
        """A save has been begun, and kept training for so long."""
        self._last, self.stall_seconds = self._now(), stall_seconds
