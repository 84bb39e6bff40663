"""How many micro-batches of a step each rank computes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

MIN_GAIN = 0.05
"""The least part of a step's time that a new division must save, by its prediction."""


def equal_division(total: int, ranks: int) -> tuple[int, ...]:
    """``total`` micro-batches in parts that differ by at most 1; the first ranks have more."""
    whole, rest = divmod(total, ranks)
    return tuple(whole + (rank < rest) for rank in range(ranks))


def step_seconds(counts: Sequence[int], speeds: Sequence[float], lockstep: bool) -> float:
    """The predicted time of a step, in units of a micro-batch at speed 1.

    Args:
        counts: micro-batches of each rank.
        speeds: relative speed of each rank.
        lockstep: all ranks wait for each other in every micro-batch, because they gather
            parameters or exchange tokens; otherwise they wait at the end of the step only.
    """
    if not lockstep:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))
    # In turn k the ranks with more than k micro-batches compute one each.
    seconds, before = 0.0, 0
    for count in sorted(set(counts)):
        slowest = min(speed for n, speed in zip(counts, speeds, strict=True) if n >= count)
        seconds += (count - before) / slowest if count else 0.0
        before = count
    return seconds


@lru_cache(maxsize=16)  # asked for every step
def divide(
    total: int, speeds: tuple[float, ...], *, lockstep: bool, min_gain: float
) -> tuple[int, ...]:
    """The micro-batches of each rank, at least one where there are enough.

    Without ``lockstep`` each micro-batch goes to the rank that would be done with it first, which
    makes the step as short as possible (list scheduling of equal jobs on uniform machines), in
    proportion to speed. With ``lockstep`` the number of turns is chosen for which the step is
    shortest; the slowest ranks then have none in the last turns.

    Equal parts stay where the step would become shorter by less than ``min_gain`` of its time.
    """
    ranks = len(speeds)
    equal = equal_division(total, ranks)
    if total <= ranks:
        return equal
    if lockstep:
        fewest = -(-total // ranks)
        plans = [_in_turns(total, speeds, turns) for turns in range(fewest, 2 * fewest + 1)]
        best = min(plans, key=lambda counts: step_seconds(counts, speeds, True))
    else:
        best = _first_done(total, speeds)
    now = step_seconds(equal, speeds, lockstep)
    return best if step_seconds(best, speeds, lockstep) < now * (1 - min_gain) else equal


def _first_done(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    counts = [1] * len(speeds)
    done = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(done)
    for _ in range(total - len(speeds)):
        _, rank = done[0]
        counts[rank] += 1
        heapq.heapreplace(done, ((counts[rank] + 1) / speeds[rank], rank))
    return tuple(counts)


def _in_turns(total: int, speeds: Sequence[float], turns: int) -> tuple[int, ...]:
    """At most ``turns`` micro-batches each, and as few as possible for the slowest ranks."""
    counts = [turns] * len(speeds)
    over = turns * len(speeds) - total
    for speed in sorted(set(speeds)):
        alike = [rank for rank, other in enumerate(speeds) if other == speed]
        take = min(over, (turns - 1) * len(alike))
        # Ranks of one speed give up equally many, the last ranks one more.
        for rank, part in zip(reversed(alike), equal_division(take, len(alike)), strict=True):
            counts[rank] -= part
        over -= take
    return tuple(counts)


@dataclass(frozen=True)
class Division:
    """The division of every step of a run.

    Args:
        ranks: the ranks that read different samples.
        lockstep: as in :func:`step_seconds`.
        min_gain: as in :func:`divide`.
        speeds: relative speed of each rank; None for equal parts.
    """

    ranks: int
    lockstep: bool = True
    min_gain: float = MIN_GAIN
    speeds: tuple[float, ...] | None = None

    def counts(self, total: int) -> tuple[int, ...]:
        """The micro-batches of each rank in a step of ``total`` micro-batches."""
        if self.speeds is None:
            return equal_division(total, self.ranks)
        return divide(total, self.speeds, lockstep=self.lockstep, min_gain=self.min_gain)

    def gain(self, total: int) -> float:
        """The predicted part of a step's time that this division saves over equal parts."""
        if self.speeds is None:
            return 0.0
        now = step_seconds(equal_division(total, self.ranks), self.speeds, self.lockstep)
        return 1 - step_seconds(self.counts(total), self.speeds, self.lockstep) / now
