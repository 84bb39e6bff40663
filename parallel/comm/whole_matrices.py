"""Whole matrices for an optimizer that needs them, of parameters that ranks hold in slices.

Legend: B matrices of one shape, M rows, N columns, E experts.

Each matrix has an owner among the ranks that hold a slice of it. One all-to-all brings the slices
to the owners, each owner computes, and a second all-to-all brings every rank its slice of the
result, on all replicas. So no two ranks compute the same, replicas keep equal bits, and each number
travels once there and once to each replica. All ranks derive owners and messages from the layouts
alone. What one rank holds whole stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import exchange_rows
from parallel.layout import Box, ShardLayout, box_shape

MOST_ELEMENTS = 1 << 25
"""Elements of the matrices that one rank has whole at a time, except where one matrix has more."""


class Matrices(NamedTuple):
    """Matrices of one parameter: consecutive experts of a stack [E, M, N], or the only one."""

    name: str
    first: int
    """The first expert in the whole stack; 0 of a parameter with two dims."""
    number: int
    rows: int
    columns: int


class Slice(NamedTuple):
    """What a rank holds of a parameter, as [E, M, N] of those experts, rows and columns."""

    experts: tuple[int, int]
    box: Box
    """Rows and columns."""

    @property
    def size(self) -> int:
        """Elements of one matrix."""
        (top, bottom), (left, right) = self.box
        return (bottom - top) * (right - left)


@dataclass(frozen=True)
class Share:
    """Some matrices with the rank that computes with them. Ranks are numbers within the group."""

    matrices: Matrices
    owner: int
    slices: tuple[Slice | None, ...]
    """By rank: what the rank holds; None where it holds nothing of these matrices."""
    replica: int
    """Consecutive ranks that hold a replica of the model."""

    @cached_property
    def senders(self) -> frozenset[int]:
        """Ranks that send the owner their slice: of those with equal slices the nearest one, first
        of all within the owner's replica."""

        def far(rank: int) -> tuple[bool, int, int]:
            elsewhere = rank // self.replica != self.owner // self.replica
            return elsewhere, abs(rank - self.owner), rank

        nearest: dict[Box, int] = {}
        for rank in sorted(self.holders, key=far):
            held = self.slices[rank]
            assert held is not None
            nearest.setdefault(held.box, rank)
        return frozenset(nearest.values())

    @cached_property
    def holders(self) -> list[int]:
        """Ranks that hold a slice."""
        return [rank for rank, held in enumerate(self.slices) if held is not None]

    def elements(self, rank: int) -> int:
        """Elements of the slices of all these matrices on a rank."""
        held = self.slices[rank]
        assert held is not None
        return self.matrices.number * held.size


def share_out(
    layouts: Mapping[str, ShardLayout],
    ranks: Sequence[int],
    cost: Callable[[int, int], float],
    most_elements: int = MOST_ELEMENTS,
) -> list[list[Share]]:
    """Who computes with which matrices, in rounds; equal on all ranks, without communication.

    The costliest matrices are given away first, each to the rank with the least to do of those
    that hold a slice (longest processing time first; Graham, SIAM J. Appl. Math. 17, 1969).

    Args:
        layouts: of the parameters by name, [M, N] or [E, M, N].
        ranks: the numbers in ``layouts`` of the ranks of the group.
        cost: of one matrix of M rows and N columns, in any unit.
        most_elements: of one rank in one round.

    Returns:
        The shares of each round. A rank's share may be empty.
    """
    undivided: list[tuple[Matrices, tuple[Slice | None, ...], int]] = []
    known: dict[ShardLayout, list[tuple[int, int, tuple[Slice | None, ...]]]] = {}
    for name, layout in layouts.items():
        *_, rows, columns = layout.shape
        if layout not in known:
            known[layout] = list(_runs(layout, ranks, most_elements))
        replica = max(1, len(ranks) // layout.topology.dp_replicate)
        for first, count, slices in known[layout]:
            undivided.append((Matrices(name, first, count, rows, columns), slices, replica))
    costs = [m.number * cost(m.rows, m.columns) for m, _, _ in undivided]
    busy, filled, rounds = [0.0] * len(ranks), [(0, 0)] * len(ranks), list[list[Share]]()
    for i in sorted(range(len(undivided)), key=lambda i: (-costs[i], i)):
        matrices, slices, replica = undivided[i]
        holders = [rank for rank, held in enumerate(slices) if held is not None]
        owner = min(holders, key=lambda rank: (busy[rank], rank))
        busy[owner] += costs[i]
        at, has = filled[owner]
        size = matrices.number * matrices.rows * matrices.columns
        if has and has + size > most_elements:
            at, has = at + 1, 0
        filled[owner] = at, has + size
        while len(rounds) <= at:
            rounds.append([])
        rounds[at].append(Share(matrices, owner, slices, replica))
    return rounds


def _runs(
    layout: ShardLayout, ranks: Sequence[int], most_elements: int
) -> Iterator[tuple[int, int, tuple[Slice | None, ...]]]:
    """Runs of matrices that the same ranks hold, at least one for each of these ranks where there
    are so many: first expert, number, and the slices by rank."""
    slices = [_slice(layout.box(rank)) for rank in ranks]
    for experts in sorted({held.experts for held in slices if held is not None}):
        here = tuple(
            held if held is not None and held.experts == experts else None for held in slices
        )
        holders = sum(held is not None for held in here)
        count = experts[1] - experts[0]
        size = math.prod(layout.shape[-2:])
        runs = min(count, max(holders, -(-count * size // most_elements)))
        cuts = [experts[0] + count * i // runs for i in range(runs + 1)]
        for first, after in pairwise(cuts):
            yield first, after - first, here


def _slice(box: Box) -> Slice | None:
    if any(start == stop for start, stop in box):
        return None
    return Slice(box[0] if len(box) == 3 else (0, 1), box[-2:])


Read = Callable[[str, slice], Tensor]
"""The local part [experts, rows, columns] of a parameter's ``slice`` of local experts."""
Write = Callable[[str, slice, Tensor], None]
"""Takes the same part of the result."""


class WholeMatrices:
    """Calls a function with whole matrices, wherever their slices are.

    Args:
        layouts: of the parameters of this rank's stages by name, [M, N] or [E, M, N].
        cost: of a matrix, see :func:`share_out`.
        group: the ranks that hold these parameters; None for one process.
        device: where matrices are put together and computed with.
        dtype: of what is sent and computed with.
    """

    def __init__(
        self,
        layouts: Mapping[str, ShardLayout],
        cost: Callable[[int, int], float],
        group: dist.ProcessGroup | None,
        device: torch.device,
        dtype: torch.dtype,
        most_elements: int = MOST_ELEMENTS,
    ) -> None:
        ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.group, self.device, self.dtype = group, device, dtype
        self.rank = 0 if group is None else group.rank()
        self.rounds = [
            _Round(shares, self.rank, len(ranks))
            for shares in share_out(layouts, ranks, cost, most_elements)
        ]

    def apply(self, function: Callable[[Tensor], Tensor], read: Read, write: Write) -> None:
        """Replace every matrix by ``function`` of it; every rank of the group must call.

        Args:
            function: [B, M, N] -> [B, M, N], of each matrix by itself.
            read: gives the local slices.
            write: takes the local slices of the results.
        """
        for each in self.rounds:
            self._apply(each, function, read, write)

    def _apply(
        self, each: _Round, function: Callable[[Tensor], Tensor], read: Read, write: Write
    ) -> None:
        there = self._buffer(each.there.sent)
        for (share, _), part in each.there.outgoing(there):
            held = share.slices[self.rank]
            part.copy_(read(share.matrices.name, _local(share, held)))
        there = self._exchange(each, each.there, there)
        wholes = {
            shape: torch.empty(count, *shape, dtype=self.dtype, device=self.device)
            for shape, count in each.batches.items()
        }
        for (share, rank), part in each.there.incoming(there):
            each.cut(wholes, share, rank).copy_(part)
        del there
        results = {shape: function(whole) for shape, whole in wholes.items()}
        del wholes
        back = self._buffer(each.back.sent)
        for (share, rank), part in each.back.outgoing(back):
            part.copy_(each.cut(results, share, rank))
        del results
        back = self._exchange(each, each.back, back)
        for (share, _), part in each.back.incoming(back):
            write(share.matrices.name, _local(share, share.slices[self.rank]), part)

    def _buffer(self, splits: Sequence[int]) -> Tensor:
        return torch.empty(sum(splits), dtype=self.dtype, device=self.device)

    def _exchange(self, each: _Round, way: _Way, sent: Tensor) -> Tensor:
        if not each.crosses or self.group is None:
            return sent
        received = self._buffer(way.received)
        exchange_rows(received, sent, self.group, "dp", way.received, way.sent).wait()
        return received


def _local(share: Share, held: Slice | None) -> slice:
    """Where these matrices are among a rank's local experts."""
    assert held is not None
    start = share.matrices.first - held.experts[0]
    return slice(start, start + share.matrices.number)


class _Way:
    """The messages of one rank in one all-to-all; a message has the slices of several shares.

    Args:
        out: what this rank sends: shares, and the rank whose slice of them is sent, by receiver.
        into: what it receives: the same, by sender.
    """

    def __init__(
        self, out: Sequence[list[tuple[Share, int]]], into: Sequence[list[tuple[Share, int]]]
    ) -> None:
        self._out = [part for message in out for part in message]
        self._into = [part for message in into for part in message]
        self.sent = [sum(share.elements(rank) for share, rank in message) for message in out]
        """Elements for each rank."""
        self.received = [sum(share.elements(rank) for share, rank in message) for message in into]
        """Elements from each rank."""

    def outgoing(self, buffer: Tensor) -> Iterator[tuple[tuple[Share, int], Tensor]]:
        """Each slice that is sent with its place in the buffer, [experts, rows, columns]."""
        return _parts(self._out, buffer)

    def incoming(self, buffer: Tensor) -> Iterator[tuple[tuple[Share, int], Tensor]]:
        """Each slice that is received with its place in the buffer."""
        return _parts(self._into, buffer)


def _parts(
    parts: Sequence[tuple[Share, int]], buffer: Tensor
) -> Iterator[tuple[tuple[Share, int], Tensor]]:
    at = 0
    for share, rank in parts:
        held = share.slices[rank]
        assert held is not None
        size = share.elements(rank)
        shape = (share.matrices.number, *box_shape(held.box))
        yield (share, rank), buffer[at : at + size].view(shape)
        at += size


class _Round:
    """What one rank sends, computes and receives of some shares."""

    def __init__(self, shares: Sequence[Share], rank: int, ranks: int) -> None:
        own = [share for share in shares if share.owner == rank]
        by_owner: list[list[Share]] = [[] for _ in range(ranks)]
        for share in shares:
            by_owner[share.owner].append(share)
        self.crosses = any(len(share.holders) > 1 for share in shares)
        """Whether some rank needs what another rank has: equal on all ranks."""
        self.there = _Way(
            [[(s, rank) for s in theirs if rank in s.senders] for theirs in by_owner],
            [[(s, other) for s in own if other in s.senders] for other in range(ranks)],
        )
        self.back = _Way(
            [[(s, other) for s in own if s.slices[other] is not None] for other in range(ranks)],
            [[(s, rank) for s in theirs if s.slices[rank] is not None] for theirs in by_owner],
        )
        self.batches: dict[tuple[int, int], int] = {}
        """By rows and columns: how many matrices this rank computes with."""
        self._starts: dict[Matrices, int] = {}
        for share in own:
            shape = share.matrices.rows, share.matrices.columns
            self._starts[share.matrices] = self.batches.get(shape, 0)
            self.batches[shape] = self._starts[share.matrices] + share.matrices.number

    def cut(self, wholes: Mapping[tuple[int, int], Tensor], share: Share, rank: int) -> Tensor:
        """A rank's slice of own matrices."""
        matrices, held = share.matrices, share.slices[rank]
        assert held is not None
        start = self._starts[matrices]
        batch = wholes[matrices.rows, matrices.columns][start : start + matrices.number]
        (top, bottom), (left, right) = held.box
        return batch[:, top:bottom, left:right]
