"""Ranks that are slow as a whole: which they are, since when, and what an answer has gained.

The numbers are those that ranks exchange at the step barrier, so that every rank finds the same. A
rank's speed is the FLOPs of its work over its own seconds: those of the step without the time in
which the rank waited in collectives. The test is :class:`router.RelativeSpeeds`, the test of
straggler-aware capacity. What is done about a slow rank is decided in :mod:`pretrain.train`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from parallel import Topology
from pretrain.parts.stragglers.config import StragglersConfig
from router import RelativeSpeeds, Shift, SpeedTest, in_groups

GAIN_STEPS = 8
"""The steps before an answer, and after it, whose median times are compared."""


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow."""

    rank: int
    speed: float
    """Over the median speed of the other ranks of its pipeline stage."""
    z: float
    """How many standard errors the change was."""
    since_step: int
    """The first slow step."""
    lasting: bool = False
    """Whether the rank has been slow for ``patience_steps``."""


@dataclass(frozen=True)
class Findings:
    """What a step has shown."""

    found: list[Straggler] = field(default_factory=list)
    """Ranks that are slow from now on, or slow by another factor."""
    ended: list[Straggler] = field(default_factory=list)
    """Ranks that were slow until now."""
    lasting: list[Straggler] = field(default_factory=list)
    """Ranks that have been slow for ``patience_steps`` with this step."""
    changed: bool = False
    """Whether the speed of some rank has changed."""


class Stragglers:
    """The speeds of all ranks, and the slow ranks; every rank keeps equal copies.

    Ranks are compared within a pipeline stage.

    Args:
        config: what counts as slow.
        topology: of the run.
        token_flops: of a token outside the routed experts, in a forward.
        row_flops: of an assignment to an expert, in a forward.
    """

    def __init__(
        self,
        config: StragglersConfig,
        topology: Topology,
        *,
        token_flops: float,
        row_flops: float,
    ) -> None:
        self.config, self.topology = config, topology
        self.token_flops, self.row_flops = token_flops, row_flops
        self.per_stage = topology.world // topology.pp
        self.measured = RelativeSpeeds.start(topology.world, topology.pp)
        self.slow: dict[int, Straggler] = {}
        """By rank."""
        self.division_speeds: tuple[float, ...] | None = None
        """For each data-parallel rank the speed by which micro-batches are divided; None for equal
        parts."""
        self._dp_ranks = np.array([topology.dp_rank(rank) for rank in range(topology.world)])
        self._dp_size = topology.dp_replicate * topology.dp_shard
        self.test = SpeedTest(
            min_change=config.min_slowdown,
            ranks=topology.world,
        )

    def dp_rank(self, rank: int) -> int:
        """The index of a rank among the ranks that get different sequences."""
        return int(self._dp_ranks[rank])

    @property
    def dp_speeds(self) -> tuple[float, ...]:
        """For each data-parallel rank the speed of its slowest rank; an ordinary rank has 1."""
        speeds = np.full(self._dp_size, math.inf)
        np.minimum.at(speeds, self._dp_ranks, self._levels)
        return tuple(round(speed, 4) for speed in speeds.tolist())

    @property
    def _levels(self) -> list[float]:
        return self.measured.levels

    def work(self, tokens: ArrayLike, rows: ArrayLike) -> np.ndarray:
        """FLOPs of each rank in a step, up to a factor that the ranks of a stage share.

        Args:
            tokens: target tokens that each rank has reported; the ranks of one data-parallel rank
                together report those of its micro-batches.
            rows: assignments that each rank's experts computed.
        """
        own = np.bincount(self._dp_ranks, np.asarray(tokens), self._dp_size)[self._dp_ranks]
        shared = self.topology.cp * self.topology.tp * self.topology.pp
        # A rank without tokens of its own shows no speed: only the overhead of its layers.
        flops: np.ndarray = self.token_flops * own / shared + self.row_flops * np.asarray(rows)
        return np.where(own != 0, flops, 0.0)

    def after(self, step: int, tokens: ArrayLike, rows: ArrayLike, seconds: ArrayLike) -> Findings:
        """Take in a committed step; all arrays are in rank order.

        Args:
            step: the committed step.
            tokens: as in :meth:`work`.
            rows: as in :meth:`work`.
            seconds: each rank's seconds of the step, waiting in collectives excluded.
        """
        work, own = map(torch.from_numpy, (self.work(tokens, rows), np.asarray(seconds)))
        self.measured = self.measured.after(work, own, self.test)
        shifts = {shift.rank: shift for shift in self.measured.shifts}
        before = self.slow
        if shifts:
            self.slow = self._slow_ranks(step, shifts)
        lasting = [
            replace(one, lasting=True)
            for one in self.slow.values()
            if not one.lasting and step - one.since_step >= self.config.patience_steps
        ]
        self.slow |= {one.rank: one for one in lasting}
        return Findings(
            found=[self.slow[rank] for rank in sorted(shifts) if rank in self.slow],
            ended=[one for rank, one in before.items() if rank not in self.slow],
            lasting=lasting,
            changed=bool(shifts),
        )

    def _slow_ranks(self, step: int, shifts: dict[int, Shift]) -> dict[int, Straggler]:
        slow, levels, n = {}, self._levels, self.per_stage
        for rank, level in enumerate(levels):
            first = self.topology.place(rank).pp * n
            others = [levels[i] for i in range(first, first + n) if i != rank]
            speed = level / median(others) if others else 1.0
            if speed * (1 + self.config.min_slowdown) > 1:
                continue
            known, shift = self.slow.get(rank), shifts.get(rank)
            if known is not None:
                slow[rank] = replace(known, speed=speed, z=known.z if shift is None else shift.z)
            elif shift is not None:
                slow[rank] = Straggler(rank, speed, shift.z, step - shift.steps + 1)
        return slow

    def state(self) -> dict[str, Any]:
        """Speeds, slow ranks and division as plain JSON, for a checkpoint."""
        return {
            "measured": in_groups(self.measured.state(), self.topology.pp),
            "slow": [asdict(one) for one in self.slow.values()],
            "division_speeds": self.division_speeds and list(self.division_speeds),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned; the checkpoint must have this run's topology."""
        stages = state["measured"]
        self.measured = RelativeSpeeds.load(
            [rank for stage in stages for rank in stage], len(stages)
        )
        self.slow = {one["rank"]: Straggler(**one) for one in state["slow"]}
        speeds = state["division_speeds"]
        self.division_speeds = None if speeds is None else tuple(speeds)


@dataclass(frozen=True)
class Gain:
    """The time of a step before an answer to a slow rank, and after it."""

    stage: int
    """1: capacity of experts; 2: division of micro-batches."""
    seconds_before: float
    seconds_after: float


class GainMeter:
    """Compares the medians of step times before and after an answer.

    A checkpoint does not keep the meter: after a restart there is nothing to compare.
    """

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=GAIN_STEPS)
        self._open: dict[int, tuple[float, list[float]]] = {}

    def begin(self, stage: int) -> None:
        """An answer of a stage holds from the next step on."""
        if self._recent:
            self._open[stage] = median(self._recent), []

    def after(self, seconds: float) -> list[Gain]:
        """Take in the seconds of a step; returns the comparisons that are complete."""
        self._recent.append(seconds)
        gains = []
        for stage, (before, values) in list(self._open.items()):
            values.append(seconds)
            # The first step with new shapes allocates memory, and does not count.
            if len(values) > GAIN_STEPS:
                del self._open[stage]
                gains.append(Gain(stage, before, median(values[1:])))
        return gains
