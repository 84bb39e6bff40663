"""Which ranks of a group have changed their speed for good, told apart from noise.

The test is a control chart with runs rules (Western Electric, Statistical Quality Control Handbook,
1956; Champ and Woodall, Technometrics 29(4), 1987). A step gives each rank the residual

    r = log(seconds / work) - level - common,

with ``common`` the median over ranks of log(seconds / work) - level, so that a step in which all
ranks are slow moves no residual. With the noise s of the rank, the rank has changed its speed where
at least q of its last n residuals are above a(n)·s, or as many below -a(n)·s, for a pair (n, q) of
``RULES``. The threshold a(n) solves

    P[Binomial(n, p) >= q] = rate / (2 · rules · ranks),  p = e + (1 - e) · (1 - Phi(a)),

with ``rate`` the false alarms per step of the whole group, Phi the normal distribution, and e =
``SPIKES`` the share of steps in which anything may happen (the contamination model of Huber, Ann.
Math. Statist. 35, 1964). The noise of a rank is the larger of two robust estimates: the median
absolute deviation (Hampel, JASA 69, 1974), and the median absolute difference of successive
residuals, which a change of speed does not raise.

Every function is a pure function of numbers that all ranks exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist, median
from typing import Any, NamedTuple

RULES = ((8, 8), (16, 12), (32, 24), (64, 48))
"""(n, q): at least q of the last n residuals are beyond the threshold. The first rule finds a large
change in 8 steps, the last rule finds a change of one and a half times the noise."""
SPIKES = 0.05
"""The share of a healthy rank's steps that may have any time at all."""

_UNIT = 10_000
"""Logarithms are kept as whole numbers of 1/_UNIT. Rounding hides last bits in which the logarithms
of two processors may differ, and whole numbers are short in a checkpoint."""
_MOST = max(n for n, _ in RULES)
_BITS = (1 << _MOST) - 1
_WINDOWS = tuple(((1 << n) - 1, q) for n, q in RULES)
_NORMAL = NormalDist()
_MAD = _NORMAL.inv_cdf(0.75)
"""The median absolute deviation of a normal variable with standard deviation 1."""
_PRIOR_STEPS = 16
"""The group's noise counts as so many steps of a rank's own noise."""
_COMPANION_RATE = 1e-3
"""False alarms per step of one rank, where another rank of the group has changed for certain."""


@dataclass(frozen=True)
class SpeedTest:
    """What counts as a change of speed."""

    min_change: float = 0.1
    """Smaller relative changes are ignored, however certain they are."""
    false_alarm_rate: float = 1e-6
    """Expected changes per step that are found among ranks that are all healthy."""
    warmup_steps: int = 2
    """The first steps of a process, which are ignored."""
    ranks: int = 0
    """The ranks that share ``false_alarm_rate``; 0 means those of the group."""

    @property
    def least(self) -> float:
        """``min_change`` as a difference of logarithms, in 1/_UNIT."""
        return math.log1p(self.min_change) * _UNIT


@dataclass(frozen=True)
class Shift:
    """A change of a rank's speed that the test has found."""

    rank: int
    """The index in the group."""
    steps: int
    """The measured steps since the change."""
    z: float
    """The median residual since the change over its standard error."""


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
class RelativeSpeeds:
    """The speeds of a group's ranks relative to each other."""

    ranks: tuple[RankSpeed, ...]
    ignored: int = 0
    """The warm-up steps so far; a checkpoint does not keep this number, because every process warms
    up."""
    shifts: tuple[Shift, ...] = ()
    """What the last step has changed."""

    @staticmethod
    def start(ranks: int) -> RelativeSpeeds:
        """Equal speeds, before any measurement."""
        return RelativeSpeeds((RankSpeed(),) * ranks)

    @staticmethod
    def of_shares(shares: Sequence[float]) -> RelativeSpeeds:
        """Speeds that are known from shares of work only, before any measurement."""
        logs = [round(-math.log(share) * _UNIT) for share in shares]
        middle = round(median(logs))
        return RelativeSpeeds(tuple(RankSpeed(level=each - middle) for each in logs))

    @property
    def levels(self) -> list[float]:
        """For each rank the factor of the last change: 1 for an ordinary rank, 0.5 for a rank with
        half the speed."""
        return [math.exp(-rank.level / _UNIT) for rank in self.ranks]

    @property
    def current(self) -> list[float | None]:
        """For each rank the median speed of its last 8 steps relative to the group; None for a rank
        without a measurement."""
        return [
            math.exp(-median(rank.recent[-RULES[0][0] :]) / _UNIT) if rank.recent else None
            for rank in self.ranks
        ]

    def state(self) -> list[list[Any]]:
        """Level, steps and recent values of each rank, as plain JSON."""
        return [[rank.level, rank.steps, list(rank.recent)] for rank in self.ranks]

    @staticmethod
    def load(state: Sequence[Sequence[Any]]) -> RelativeSpeeds:
        """What :meth:`state` returned; the warm-up begins anew."""
        ranks = (RankSpeed(recent=tuple(recent)).at(level, steps) for level, steps, recent in state)
        return RelativeSpeeds(tuple(ranks))

    def after(
        self, work: Sequence[float], seconds: Sequence[float], test: SpeedTest
    ) -> RelativeSpeeds:
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

    def _with_shifts(self, tested: Sequence[int], test: SpeedTest) -> RelativeSpeeds:
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


def noise(rank: RankSpeed) -> float:
    """The standard deviation of a rank's residuals, in 1/_UNIT, see the head of this file."""
    recent = rank.recent
    differences = [abs(b - a) for a, b in pairwise(recent)]
    sigma = median(differences) / (_MAD * math.sqrt(2)) if differences else 0.0
    residuals = rank.residuals
    if len(residuals) >= _PRIOR_STEPS:
        middle = median(residuals)
        sigma = max(sigma, median(abs(r - middle) for r in residuals) / _MAD)
    # Nothing is measured more exactly than this.
    return max(sigma, 0.001 * _UNIT)


@lru_cache
def thresholds(rate: float) -> tuple[float, ...]:
    """a(n) of every rule, in standard deviations; infinite where SPIKES make more false alarms.

    Args:
        rate: false alarms per step on one side of one rank.
    """
    each = rate / len(RULES)
    return tuple(_threshold(n, q, each) for n, q in RULES)


def _threshold(n: int, q: int, rate: float) -> float:
    if _tail(n, q, SPIKES) >= rate:
        return math.inf
    low, high = SPIKES, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _tail(n, q, middle) < rate else (low, middle)
    beyond = (low - SPIKES) / (1 - SPIKES)
    return 0.0 if beyond >= 0.5 else -_NORMAL.inv_cdf(beyond)


def _tail(n: int, q: int, p: float) -> float:
    """P[Binomial(n, p) >= q]."""
    return math.fsum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(q, n + 1))


def _log(work: float, seconds: float) -> int | None:
    """log(seconds / work) in 1/_UNIT; None without a measurement."""
    if not (work > 0 and seconds > 0 and math.isfinite(work) and math.isfinite(seconds)):
        return None
    return round((math.log(seconds) - math.log(work)) * _UNIT)


def _extreme(residuals: Sequence[int], q: int, least: float) -> int:
    """The residual that q of ``residuals`` reach on one side; 0 where there is no such side, or the
    median is a change of less than ``least``."""
    ordered = sorted(residuals)
    if abs(median(ordered)) < least:
        return 0
    if ordered[-q] > 0:
        return ordered[-q]
    return min(ordered[q - 1], 0)


def _caution(steps: int) -> float:
    """The factor on a noise that is known from few steps: about two standard errors more."""
    return 1 + 2 / math.sqrt(steps)


def _since(residuals: Sequence[int], sigma: float) -> tuple[int, float]:
    """The steps since a change, and its z.

    The change is where the clipped sum of the residuals since then is largest, in standard errors
    (the likelihood-ratio estimate of a change point; Hinkley, Biometrika 57, 1970).
    """
    clip, total = 2 * sigma, 0.0
    best, steps = -1.0, len(residuals)
    for count, r in enumerate(reversed(residuals), 1):
        total += min(max(r, -clip), clip)
        score = abs(total) / math.sqrt(count)
        if count >= RULES[0][0] and score > best:
            best, steps = score, count
    # The standard error of a median is sqrt(pi / 2) times that of a mean.
    z = abs(median(residuals[-steps:])) * math.sqrt(2 * steps / math.pi) / sigma
    return steps, z
