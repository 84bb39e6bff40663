"""Shares of work for ranks of different speed: the plan of straggler-aware capacity.

Every function is a pure function of numbers that all ranks exchange, so that every rank computes
the same plan. Nothing here measures, waits or communicates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from router.config import StragglerAwareConfig
from router.relative_speed import RelativeSpeeds, SpeedTest

UNITS_PER_RANK = 1024
"""The units of a plan sum to this number times the number of ranks."""


def largest_remainder(total: int, weights: Sequence[Fraction]) -> list[int]:
    """Whole numbers in proportion to ``weights`` that sum to ``total`` (Hamilton's method).

    Each number is the exact share rounded down. The rest is given to the largest remainders, one
    unit each, and to the first of equal remainders.
    """
    weight = sum(weights)
    exact = [total * w / weight for w in weights]
    whole = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


@dataclass(frozen=True)
class CapacityPlan:
    """The share of work of each rank of an expert group, in whole units."""

    units: tuple[int, ...]
    """The units of each rank; their sum is UNITS_PER_RANK · ranks."""

    @staticmethod
    def equal(ranks: int) -> CapacityPlan:
        """Equal shares."""
        return CapacityPlan((UNITS_PER_RANK,) * ranks)

    @property
    def shares(self) -> list[float]:
        """The share of each rank; the mean share is 1."""
        return [u / UNITS_PER_RANK for u in self.units]


def bounded_shares(speeds: Sequence[float], floor: float, ceiling: float) -> list[Fraction]:
    """Shares in proportion to speed with a mean of 1, none under ``floor`` or over ``ceiling``.

    Ranks that no bound holds divide the rest in proportion to speed. floor <= 1 <= ceiling.
    """
    exact = [Fraction(s) for s in speeds]
    low, high = Fraction(str(floor)), Fraction(str(ceiling))
    ranks = len(exact)
    # share(x) = clamp(speed · x) summed over ranks grows with x: walk its corners to the sum.
    corners = sorted({bound / s for s in exact for bound in (low, high)})

    def total(x: Fraction) -> Fraction:
        return sum((min(max(s * x, low), high) for s in exact), Fraction(0))

    place = bisect_right(corners, Fraction(ranks), key=total)
    below = corners[place - 1] if place else Fraction(0)
    free = sum((s for s in exact if low <= s * below < high), Fraction(0))
    x = below + (ranks - total(below)) / free if free else below
    return [min(max(s * x, low), high) for s in exact]


@dataclass(frozen=True)
class StragglerBalancer:
    """The measured speeds of an expert group's ranks, and the current plan."""

    measured: RelativeSpeeds
    """Speeds in assignments per second of expert compute."""
    plan: CapacityPlan

    @staticmethod
    def start(ranks: int) -> StragglerBalancer:
        """Equal shares, before any measurement."""
        return StragglerBalancer(RelativeSpeeds.start(ranks), CapacityPlan.equal(ranks))

    @property
    def speeds(self) -> list[float | None]:
        """For each rank the median speed of its last 8 steps relative to the group; None for a rank
        that has computed nothing so far."""
        return self.measured.current

    def after(
        self,
        rows: Sequence[float],
        seconds: Sequence[float],
        config: StragglerAwareConfig,
        ranks: int = 0,
    ) -> StragglerBalancer:
        """Speeds and plan after a step.

        The plan changes only after a step in which :class:`router.relative_speed.RelativeSpeeds`
        has found that the speed of some rank has changed. A rank that computed nothing keeps its
        speed.

        Args:
            rows: the assignments that each rank computed in the step.
            seconds: the time that each rank's experts took.
            config: the test's options, floor and ceiling.
            ranks: the ranks of all expert groups, which share the test's ``false_alarm_rate``; 0
                means those of this group.
        """
        measured = self.measured.after(rows, seconds, speed_test(config, ranks))
        plan = plan_for(measured.levels, config) if measured.shifts else self.plan
        return StragglerBalancer(measured, plan)


def plan_for(levels: Sequence[float], config: StragglerAwareConfig) -> CapacityPlan:
    """The plan of a group whose ranks have these speeds."""
    shares = bounded_shares(levels, config.floor, config.ceiling)
    return CapacityPlan(tuple(largest_remainder(UNITS_PER_RANK * len(shares), shares)))


def speed_test(config: StragglerAwareConfig, ranks: int = 0) -> SpeedTest:
    """The options of the test on speeds, for ``ranks`` ranks in all expert groups."""
    return SpeedTest(min_change=config.hysteresis, ranks=ranks)
