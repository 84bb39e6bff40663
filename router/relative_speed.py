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
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from router.speed_windows import SpeedWindows

T = TypeVar("T")
Numbers = Sequence[float] | Tensor
RULES = ((8, 8), (16, 12), (32, 24), (64, 48))
"""(n, q): at least q of the last n residuals are beyond the threshold. The first rule finds a large
change in 8 steps, the last rule finds a change of one and a half times the noise."""
SPIKES = 0.05
"""The share of a healthy rank's steps that may have any time at all."""

_UNIT = 10_000
"""Logarithms are kept as whole numbers of 1/_UNIT. Rounding hides last bits in which the logarithms
of two processors may differ, and whole numbers are short in a checkpoint."""
_LENGTHS, _LEAST_COUNTS = zip(*RULES, strict=True)
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
    """The index among the ranks of all groups."""
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

    @property
    def residuals(self) -> list[int]:
        """The residuals since ``level`` holds."""
        return [value - self.level for value in self.recent[len(self.recent) - self.steps :]]


def in_groups(of_ranks: Sequence[T], groups: int) -> list[Sequence[T]]:
    """What each rank has, group by group."""
    size = len(of_ranks) // groups
    return [of_ranks[i : i + size] for i in range(0, len(of_ranks), size)]


@dataclass(frozen=True, eq=False)
class RelativeSpeeds:
    """The speeds of ranks relative to the other ranks of their group; groups are equally large."""

    windows: SpeedWindows
    ignored_G: Tensor
    """int64: the warm-up steps of each group so far; a checkpoint does not keep these numbers,
    because every process warms up."""
    shifts: tuple[Shift, ...] = ()
    """What the last step has changed."""

    @staticmethod
    def start(ranks: int, groups: int = 1) -> RelativeSpeeds:
        """Equal speeds of so many ranks in all groups, before any measurement."""
        return _speeds_of([RankSpeed()] * ranks, groups)

    @staticmethod
    def of_shares(*shares: Sequence[float]) -> RelativeSpeeds:
        """Speeds that are known from each group's shares of work only, before any measurement."""
        ranks: list[RankSpeed] = []
        for of_group in shares:
            logs = [round(-math.log(share) * _UNIT) for share in of_group]
            middle = round(median(logs))
            ranks += [RankSpeed(level=each - middle) for each in logs]
        return _speeds_of(ranks, len(shares))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RelativeSpeeds):
            return NotImplemented
        mine, others = ((x.state(), x.ignored_G.tolist(), x.shifts) for x in (self, other))
        return mine == others

    @property
    def ranks(self) -> tuple[RankSpeed, ...]:
        """What is known of each rank."""
        return tuple(self._some(range(len(self.windows.level_R))))

    def _some(self, ranks: Sequence[int]) -> list[RankSpeed]:
        w, index = self.windows, torch.tensor(ranks, dtype=torch.int64)
        known = w.level_R[index].tolist(), w.steps_R[index].tolist(), w.recent_of(ranks)
        return [RankSpeed(*values) for values in zip(*known, strict=True)]

    @property
    def _size(self) -> int:
        """The ranks of a group."""
        return len(self.windows.level_R) // len(self.ignored_G)

    @property
    def levels(self) -> list[float]:
        """For each rank the factor of the last change: 1 for an ordinary rank, 0.5 for a rank with
        half the speed."""
        return [math.exp(-level / _UNIT) for level in self.windows.level_R.tolist()]

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
    def load(state: Sequence[Sequence[Any]], groups: int = 1) -> RelativeSpeeds:
        """What :meth:`state` returned; the warm-up begins anew."""
        ranks = [RankSpeed(level, steps, tuple(recent)) for level, steps, recent in state]
        return _speeds_of(ranks, groups)

    def after(self, work: Numbers, seconds: Numbers, test: SpeedTest) -> RelativeSpeeds:
        """The speeds after a step; ``shifts`` says which ranks have changed.

        Args:
            work: what each rank did in the step, in any unit; 0 for a rank without a measurement.
            seconds: what each rank took for the work, waiting for other ranks excluded.
            test: what counts as a change.
        """
        logs_R, measured_R = _logs(work, seconds)
        windows, shape = self.windows, (len(self.ignored_G), self._size)
        measured_Gn = measured_R.view(shape)
        common_G, any_G = _medians((logs_R - windows.level_R).view(shape), measured_Gn)
        warm_G = self.ignored_G >= test.warmup_steps
        ignored_G = self.ignored_G + (any_G & ~warm_G)
        measured_R = (measured_Gn & warm_G.unsqueeze(1)).flatten()
        if not bool(measured_R.any()):
            return replace(self, ignored_G=ignored_G, shifts=())
        if windows.least != test.least:
            windows = windows.with_least(test.least)
        values_R = (logs_R.view(shape) - common_G.unsqueeze(1)).flatten()
        windows = windows.seen(values_R, measured_R)
        # A rank without a measurement in this step was tested when its last residual came.
        far_R = windows.far_ones(_LEAST_COUNTS) & measured_R
        speeds = replace(self, windows=windows, ignored_G=ignored_G, shifts=())
        return speeds._with_shifts(far_R.nonzero().squeeze(1).tolist(), test)

    def _with_shifts(self, tested: Sequence[int], test: SpeedTest) -> RelativeSpeeds:
        size = self._size
        sides = test.false_alarm_rate / (2 * (test.ranks or size))
        certain = {s.rank // size for s in self._shifts(tested, thresholds(sides), test)}
        if not certain:
            return self
        # Ranks of one node slow down together. All of them take part in one new plan.
        near = [rank for rank in tested if rank // size in certain]
        shifts = self._shifts(near, thresholds(_COMPANION_RATE / 2), test)
        index, steps = [shift.rank for shift in shifts], [shift.steps for shift in shifts]
        levels = []
        for recent, count in zip(self.windows.recent_of(index), steps, strict=True):
            level = round(median(recent[-count:]))
            # A rank that has recovered is exactly as fast as the others again.
            levels.append(0 if abs(level) < test.least / 2 else level)
        return replace(self, windows=self.windows.at(index, levels, steps), shifts=tuple(shifts))

    def _shifts(
        self, tested: Sequence[int], limits: Sequence[float], test: SpeedTest
    ) -> list[Shift]:
        shifts, noises, size = [], dict[int, float](), self._size
        for i, rank in zip(tested, self._some(tested), strict=True):
            residuals = rank.residuals
            extremes = [
                _extreme(residuals[-n:], q, test.least) if len(residuals) >= n else 0
                for n, q in RULES
            ]
            if not any(extremes):
                continue
            own, steps = noise(rank), len(rank.recent)
            # The group's noise takes time to compute, and cannot make the noise smaller than this.
            least = math.sqrt(steps / (steps + _PRIOR_STEPS)) * own * _caution(steps)
            if not any(abs(x) > a * least for x, a in zip(extremes, limits, strict=True)):
                continue
            group = i // size
            if group not in noises:
                others = self._some(range(group * size, (group + 1) * size))
                noises[group] = median(noise(other) for other in others if other.recent)
            square = steps * own**2 + _PRIOR_STEPS * noises[group] ** 2
            sigma = math.sqrt(square / (steps + _PRIOR_STEPS)) * _caution(steps)
            if any(abs(x) > a * sigma for x, a in zip(extremes, limits, strict=True)):
                shifts.append(Shift(i, *_since(residuals, sigma)))
        return shifts


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


def _logs(work: Numbers, seconds: Numbers) -> tuple[Tensor, Tensor]:
    """[R] log(seconds / work) in 1/_UNIT, and [R] whether there is a measurement."""
    work_R, seconds_R = (torch.as_tensor(x, dtype=torch.float64) for x in (work, seconds))
    measured_R = (work_R > 0) & (seconds_R > 0) & work_R.isfinite() & seconds_R.isfinite()
    logs_R = seconds_R.where(measured_R, 1.0).log() - work_R.where(measured_R, 1.0).log()
    return (logs_R * _UNIT).round().long(), measured_R


def _medians(numbers_Gn: Tensor, real_Gn: Tensor) -> tuple[Tensor, Tensor]:
    """[G] the median of each group's real numbers, rounded to an even number in doubt, and whether
    the group has any."""
    last = torch.iinfo(torch.int64).max
    sorted_Gn = numbers_Gn.masked_fill(~real_Gn, last).sort(1).values
    counts_G1 = real_Gn.sum(1, keepdim=True)
    middle_G2 = torch.cat([(counts_G1 - 1).clamp_min(0) // 2, counts_G1 // 2], 1)
    middle_G2 = sorted_Gn.gather(1, middle_G2.clamp_max(sorted_Gn.shape[1] - 1))
    any_G = counts_G1.squeeze(1) > 0
    middle_G2 = middle_G2.masked_fill(~any_G.unsqueeze(1), 0)
    return (middle_G2.sum(1).double() / 2).round().long(), any_G


def _speeds_of(ranks: Sequence[RankSpeed], groups: int) -> RelativeSpeeds:
    levels, steps, recent = zip(*ranks, strict=True)
    windows = SpeedWindows.of(levels, steps, recent, _LENGTHS)
    return RelativeSpeeds(windows, torch.zeros(groups, dtype=torch.int64))


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
