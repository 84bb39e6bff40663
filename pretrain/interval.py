"""When to save: every so many steps or minutes, or as often as failures make it worth."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pretrain.spec import CheckpointConfig

DEVICE_HOURS_PER_FAILURE = 50_000
"""Before a run has seen failures of its own: Llama 3 (arXiv 2407.21783, section 3.3.4) had 419
unexpected interruptions in 54 days of 16,384 devices."""

_FIRST_STALL_SECONDS = 1.0  # before any save was timed


@dataclass(frozen=True)
class History:
    """What a run's log says of its failures."""

    failures: int = 0
    """Starts that were not followed by an orderly end."""
    seconds: float = 0.0
    """Of training."""

    @classmethod
    def read(cls, path: Path) -> History:
        """From the log of the starts so far; lines that are no events are passed over."""
        starts, ends, seconds = 0, 0, 0.0
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            return cls()
        for line in lines:
            try:
                event = json.loads(line)
                name = event["event"]
            except (ValueError, TypeError, KeyError):
                continue
            starts += name == "start"
            ends += name in ("stopped", "done")
            if name == "step" and isinstance(event.get("seconds"), int | float):
                seconds += event["seconds"]
        return cls(max(0, starts - ends), seconds)


def optimal_interval(stall_seconds: float, seconds_between_failures: float) -> float:
    """The time between saves that loses the least, in seconds.

    Young's first order with Daly's higher ones (Daly, Future Generation Computer Systems 22, 2006,
    equation 37), of a save that keeps training for ``stall_seconds``.
    """
    cost, mean = stall_seconds, seconds_between_failures
    if cost >= 2 * mean:
        return mean
    ratio = cost / (2 * mean)
    return math.sqrt(2 * cost * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost


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
