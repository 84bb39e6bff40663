"""Which ranks compute how many rows of which expert, so that all ranks take equally long.

Every function is a pure function of numbers that all ranks have, so that every rank makes the same
plan. Nothing here measures, waits or communicates.

The owner of an expert is the rank that has the expert's parameters. A copy is another rank that
computes some of the expert's rows in one call: the owner sends the parameters to the copy, and the
copy sends their gradients back.

Legend: E experts, G ranks of the expert group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

LEAST_PART = 32
"""A copy computes at least one in this many of a rank's mean rows, as fewer are not worth the
transfer of an expert's parameters. A rank that has less than that beyond its share gives none
away, and a copy may take a rank beyond its share by that."""


@dataclass(frozen=True)
class CopyPlan:
    """The copies of one call, and the rows that they compute."""

    num_experts: int
    """E; each rank owns an equal block of them."""
    copies: tuple[tuple[int, ...], ...]
    """For each rank the experts of which the rank has a copy, in ascending order."""
    rows: dict[int, dict[int, int]] = field(default_factory=dict)
    """For each expert with a copy, in ascending order: by rank the rows that the rank computes, the
    owner first. The numbers sum to the expert's rows."""

    @staticmethod
    def without(num_experts: int, ranks: int) -> CopyPlan:
        """A plan without copies."""
        return CopyPlan(num_experts, ((),) * ranks)

    @property
    def num_copies(self) -> int:
        """The copies of all ranks."""
        return sum(map(len, self.copies))

    @property
    def most_copies(self) -> int:
        """The most copies that one rank has."""
        return max(map(len, self.copies))

    @property
    def block(self) -> int:
        """The experts that each rank owns."""
        return self.num_experts // len(self.copies)

    def loads(self, rows_E: Sequence[int]) -> list[int]:
        """[G] the rows that each rank computes, for [E] rows of the experts."""
        loads = _owned(rows_E, len(self.copies))
        for expert, by_rank in self.rows.items():
            loads[expert // self.block] -= rows_E[expert]
            for rank, rows in by_rank.items():
                loads[rank] += rows
        return loads


def _owned(rows_E: Sequence[int], ranks: int) -> list[int]:
    block = len(rows_E) // ranks
    return [sum(rows_E[rank * block : (rank + 1) * block]) for rank in range(ranks)]


def slowest(loads: Sequence[int], shares: Sequence[int]) -> float:
    """The time of the rank that takes longest, over the time of ranks that end together.

    Args:
        loads: [G] the rows of each rank.
        shares: [G] the speed of each rank, in any unit.
    """
    if not sum(loads):
        return 1.0
    longest = max(load / share for load, share in zip(loads, shares, strict=True))
    return longest * sum(shares) / sum(loads)


def plan_copies(
    rows_E: Sequence[int], shares: Sequence[int], most: int, ranks_per_node: int = 0
) -> CopyPlan:
    """Move rows of ranks that would take too long to copies on ranks that would wait.

    Again and again the rank with the most rows beyond its share gives rows of its largest expert to
    the rank that misses most, until one of the two is satisfied. With nodes, ranks of one node do
    so first, and what is left over crosses between nodes.

    Args:
        rows_E: [E] the rows of each expert, of all ranks.
        shares: [G] each rank's share of all rows, in any unit.
        most: the most copies of one rank.
        ranks_per_node: the consecutive ranks of one node; 0 where nodes do not matter.
    """
    ranks, total = len(shares), sum(rows_E)
    if not most or not total or ranks == 1:
        return CopyPlan.without(len(rows_E), ranks)
    state = _Moves(rows_E, shares, most)
    if 1 < ranks_per_node < ranks:
        for first in range(0, ranks, ranks_per_node):
            state.level(range(first, first + ranks_per_node))
    state.level(range(ranks))
    return state.plan()


class _Moves:
    """The rows that owners keep, and those that copies take, while a plan is made."""

    def __init__(self, rows_E: Sequence[int], shares: Sequence[int], most: int) -> None:
        self.rows_E, self.most = rows_E, most
        self.ranks, total, sum_of_shares = len(shares), sum(rows_E), sum(shares)
        self.block = len(rows_E) // self.ranks
        loads = _owned(rows_E, self.ranks)
        wanted = [total * share // sum_of_shares for share in shares]
        self.beyond = [load - rows for load, rows in zip(loads, wanted, strict=True)]
        """[G] the rows of each rank beyond its share."""
        self.least = max(total // (self.ranks * LEAST_PART), 1)
        self.kept: dict[int, list[tuple[int, int]]] = {}
        """For a rank that gives rows away, a heap of its experts: minus the rows that are left, and
        the expert."""
        self.taken: dict[int, dict[int, int]] = {}
        """For each expert with a copy, the rows by rank."""
        self.copies: list[list[int]] = [[] for _ in range(self.ranks)]

    def level(self, ranks: range) -> None:
        """Move rows between these ranks."""
        # heapq has the smallest first: what is most negative misses most.
        misses = [(self.beyond[r], r) for r in ranks if self.beyond[r] < 0]
        gives = [(-self.beyond[r], r) for r in ranks if self.beyond[r] >= self.least]
        heapify(misses)
        heapify(gives)
        while misses and gives:
            beyond, giver = -gives[0][0], gives[0][1]
            missing, taker = -misses[0][0], misses[0][1]
            if len(self.copies[taker]) >= self.most:
                heappop(misses)
                continue
            left, expert = self._largest(giver)
            # A rank that misses little takes little too much: one hot rank may have many even ones.
            moved = min(beyond, max(missing, self.least), left)
            if moved < self.least:  # no expert of the giver has rows to spare
                heappop(gives)
                continue
            self._move(expert, giver, taker, moved)
            heappop(gives)
            heappop(misses)
            if beyond - moved >= self.least:
                heappush(gives, (moved - beyond, giver))
            if missing > moved:
                heappush(misses, (moved - missing, taker))

    def _largest(self, rank: int) -> tuple[int, int]:
        """The rows that are left of a rank's largest expert, and the expert."""
        if rank not in self.kept:
            experts = range(rank * self.block, (rank + 1) * self.block)
            self.kept[rank] = [(-self.rows_E[e], e) for e in experts]
            heapify(self.kept[rank])
        left, expert = self.kept[rank][0]
        return -left, expert

    def _move(self, expert: int, giver: int, taker: int, rows: int) -> None:
        left, _ = heappop(self.kept[giver])
        heappush(self.kept[giver], (left + rows, expert))
        self.beyond[giver] -= rows
        self.beyond[taker] += rows
        by_rank = self.taken.setdefault(expert, {})
        if taker not in by_rank:
            self.copies[taker].append(expert)
        by_rank[taker] = by_rank.get(taker, 0) + rows

    def plan(self) -> CopyPlan:
        """What was moved."""
        rows = {}
        for expert in sorted(self.taken):
            by_rank = self.taken[expert]
            kept = self.rows_E[expert] - sum(by_rank.values())
            rows[expert] = {expert // self.block: kept, **dict(sorted(by_rank.items()))}
        copies = tuple(tuple(sorted(experts)) for experts in self.copies)
        return CopyPlan(len(self.rows_E), copies, rows)


Units = dict[int, list[int]]
"""For each expert with a copy: the rank that computes the rows of each sending rank."""


def whole_units(
    plan: CopyPlan, units_EG: dict[int, list[int]], rows_E: Sequence[int], shares: Sequence[int]
) -> tuple[CopyPlan, Units]:
    """The plan that computes each unit by one rank; a unit is the rows that one rank has for one
    expert. Without copies where they would save nothing.

    Args:
        plan: as from :func:`plan_copies`.
        units_EG: for each expert with a copy, the rows that each rank has for the expert.
        rows_E: [E] the rows of each expert.
        shares: [G] each rank's share.
    """
    units: Units = {}
    rows: dict[int, dict[int, int]] = {}
    for expert, by_rank in plan.rows.items():
        open_rows = dict(by_rank)
        sizes = units_EG[expert]
        takers = [expert // plan.block] * len(sizes)
        for sender in sorted(range(len(sizes)), key=lambda s: (-sizes[s], s)):
            # A rank that sends rows to itself sends nothing.
            taker = max(open_rows, key=lambda rank: (open_rows[rank], rank == sender, -rank))
            takers[sender] = taker
            open_rows[taker] -= sizes[sender]
        by_taker = dict.fromkeys(by_rank, 0)
        for sender, taker in enumerate(takers):
            by_taker[taker] += sizes[sender]
        units[expert], rows[expert] = takers, by_taker
    by_unit = _without_idle(CopyPlan(plan.num_experts, plan.copies, rows))
    before = CopyPlan.without(plan.num_experts, len(plan.copies))
    if slowest(by_unit.loads(rows_E), shares) < slowest(before.loads(rows_E), shares):
        return by_unit, {expert: units[expert] for expert in by_unit.rows}
    return before, {}


def _without_idle(plan: CopyPlan) -> CopyPlan:
    """The plan without copies that compute no row."""
    rows = {}
    for expert, by_rank in plan.rows.items():
        owner = expert // plan.block
        busy = {rank: n for rank, n in by_rank.items() if n or rank == owner}
        if len(busy) > 1:
            rows[expert] = busy
    copies = tuple(
        tuple(e for e in experts if rank in rows.get(e, ()))
        for rank, experts in enumerate(plan.copies)
    )
    return CopyPlan(plan.num_experts, copies, rows)
