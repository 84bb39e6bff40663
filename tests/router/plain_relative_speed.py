"""The test on speeds, rank by rank: what :class:`router.RelativeSpeeds` must find."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

from router import Shift, SpeedTest
from router.relative_speed import (
    _COMPANION_RATE,
    _PRIOR_STEPS,
    _UNIT,
    RULES,
    _caution,
    _extreme,
    _since,
    noise,
    thresholds,
)

_MOST = max(n for n, _ in RULES)
_BITS = (1 << _MOST) - 1
_WINDOWS = tuple(((1 << n) - 1, q) for n, q in RULES)


class RankSpeed(NamedTuple):
    """What is known of the speed of one rank."""

    level: int = 0
    """log(seconds / work) relative to the group, as found by the last change, in 1/_UNIT."""
    steps: int = 0
    """The measured steps since ``level`` holds, at most the length of ``recent``."""
    recent: tuple[int, ...] = ()
    """log(seconds / work) - common of the last steps, in 1/_UNIT."""
    above: int = 0
    """A bit for each of the last ``steps`` steps, the newest lowest: whether the residual is above
    0."""
    below: int = 0
    """As ``above``, for residuals below 0."""

    def seen(self, value: int) -> RankSpeed:
        """With one more step."""
        recent = (*self.recent, value)[-_MOST:]
        return RankSpeed(
            self.level,
            min(self.steps + 1, len(recent)),
            recent,
            (self.above << 1 | (value > self.level)) & _BITS,
            (self.below << 1 | (value < self.level)) & _BITS,
        )

    def at(self, level: int, steps: int) -> RankSpeed:
        """With another level, which holds for the last ``steps`` steps."""
        rank = RankSpeed(level, 0, self.recent[: len(self.recent) - steps])
        for value in self.recent[len(self.recent) - steps :]:
            rank = rank.seen(value)
        return rank

    @property
    def residuals(self) -> list[int]:
        """The residuals since ``level`` holds."""
        return [value - self.level for value in self.recent[len(self.recent) - self.steps :]]

    @property
    def is_one_sided(self) -> bool:
        """Whether so many residuals are on one side of 0 that a rule can apply. Most steps of most
        ranks end here, which keeps the test cheap on many ranks."""
        above, below = self.above, self.below
        for bits, q in _WINDOWS:
            if (above & bits).bit_count() >= q or (below & bits).bit_count() >= q:
                return True
        return False


@dataclass(frozen=True)
class PlainSpeeds:
    """The speeds of a group's ranks relative to each other."""

    ranks: tuple[RankSpeed, ...]
    ignored: int = 0
    """The warm-up steps so far; a checkpoint does not keep this number, because every process warms
    up."""
    shifts: tuple[Shift, ...] = ()
    """What the last step has changed."""

    @staticmethod
    def start(ranks: int) -> PlainSpeeds:
        """Equal speeds, before any measurement."""
        return PlainSpeeds((RankSpeed(),) * ranks)

    def after(
        self, work: Sequence[float], seconds: Sequence[float], test: SpeedTest
    ) -> PlainSpeeds:
        """The speeds after a step; ``shifts`` says which ranks have changed.

        Args:
            work: what each rank did in the step, in any unit; 0 for a rank without a measurement.
            seconds: what each rank took for the work, waiting for other ranks excluded.
            test: what counts as a change.
        """
        logs = [_log(n, s) for n, s in zip(work, seconds, strict=True)]
        known = [x - r.level for x, r in zip(logs, self.ranks, strict=True) if x is not None]
        if not known:
            return replace(self, shifts=())
        if self.ignored < test.warmup_steps:
            return replace(self, ignored=self.ignored + 1, shifts=())
        common = round(median(known))
        ranks = [
            rank if x is None else rank.seen(x - common)
            for x, rank in zip(logs, self.ranks, strict=True)
        ]
        # A rank without a measurement in this step was tested when its last residual came.
        tested = [i for i, x in enumerate(logs) if x is not None]
        return replace(self, ranks=tuple(ranks), shifts=())._with_shifts(tested, test)

    def _with_shifts(self, tested: Sequence[int], test: SpeedTest) -> PlainSpeeds:
        sides = test.false_alarm_rate / (2 * (test.ranks or len(self.ranks)))
        certain = self._shifts(tested, thresholds(sides), test)
        if not certain:
            return self
        # Ranks of one node slow down together. All of them take part in one new plan.
        shifts = self._shifts(tested, thresholds(_COMPANION_RATE / 2), test)
        ranks = list(self.ranks)
        for shift in shifts:
            rank = ranks[shift.rank]
            level = round(median(rank.recent[-shift.steps :]))
            if abs(level) < test.least / 2:
                level = 0  # a rank that has recovered is exactly as fast as the others again
            ranks[shift.rank] = rank.at(level, shift.steps)
        return replace(self, ranks=tuple(ranks), shifts=tuple(shifts))

    def _shifts(
        self, tested: Sequence[int], limits: Sequence[float], test: SpeedTest
    ) -> list[Shift]:
        found, group_noise = [], None
        for i in tested:
            if not self.ranks[i].is_one_sided:
                continue
            residuals = self.ranks[i].residuals
            extremes = [
                _extreme(residuals[-n:], q, test.least) if len(residuals) >= n else 0
                for n, q in RULES
            ]
            if not any(extremes):
                continue
            own, steps = noise(self.ranks[i]), len(self.ranks[i].recent)
            # The group's noise takes time to compute, and cannot make the noise smaller than this.
            least = math.sqrt(steps / (steps + _PRIOR_STEPS)) * own * _caution(steps)
            if not any(abs(x) > a * least for x, a in zip(extremes, limits, strict=True)):
                continue
            if group_noise is None:
                group_noise = median(noise(rank) for rank in self.ranks if rank.recent)
            square = steps * own**2 + _PRIOR_STEPS * group_noise**2
            sigma = math.sqrt(square / (steps + _PRIOR_STEPS)) * _caution(steps)
            if any(abs(x) > a * sigma for x, a in zip(extremes, limits, strict=True)):
                found.append(Shift(i, *_since(residuals, sigma)))
        return found


def _log(work: float, seconds: float) -> int | None:
    """log(seconds / work) in 1/_UNIT; None without a measurement."""
    if not (work > 0 and seconds > 0 and math.isfinite(work) and math.isfinite(seconds)):
        return None
    return round((math.log(seconds) - math.log(work)) * _UNIT)
