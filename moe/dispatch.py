"""Moving tokens to the ranks of their experts and back.

Legend: T tokens, D d_model, E experts, K top_k, S rows that are here, R assignments of them.

A row crosses to a rank once, however many of its experts are there, with its experts' numbers and
weights beside it; that rank sums what its experts give, and one row comes back. So T tokens cost at
most T · min(K, ranks) rows each way, and not T · K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.rows import RowMap, Rows, row_map, rows_of, sort_by_expert, sum_rows, take_rows
from parallel import (
    Arriving,
    all_gather_rows,
    exchange_counts,
    start_all_to_all,
    start_gather_rows,
    start_scatter_sums,
)
from router import RouterOutput, count_tokens_per_expert


class Arrived(NamedTuple):
    """Rows beside the experts that compute them."""

    rows: Rows
    ticket: Any
    """What the same dispatcher needs for the way back; lives as long as one forward."""


class Dispatcher(Protocol):
    """How tokens reach experts. Stateless between calls, so recomputation is safe.

    Every rank of the group must call both, and take all that comes.
    """

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[Arrived]:
        """Bring every routed row to the ranks of its experts.

        The first part is on its way when this returns; each that is taken from the iterator was
        waited for, with the next on its way. Parts are of consecutive tokens.
        """
        ...

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Callable[[], Tensor]:
        """Send the experts' sums of a part home; the result, when called, waits: [tokens, D]."""
        ...


class LocalDispatcher:
    """Every expert is here: nothing moves."""

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[Arrived]:
        """See :class:`Dispatcher`."""
        indices_TK, weights_TK = routed.expert_indices_TK, routed.expert_weights_TK
        experts = range(len(routed.rows_per_expert_E))
        length = indices_TK.numel() if routed.dropped_TK is None else None
        yield Arrived(rows_of(x_TD, indices_TK, weights_TK, experts, length), None)

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        return lambda: y_SD


class _Tokens(NamedTuple):
    """What travels: rows, and for each its experts (a number past all where there is none)."""

    x_TD: Tensor
    expert_indices_TK: Tensor
    expert_weights_TK: Tensor


def _destinations(indices_TK: Tensor, experts: range, ranks: int) -> Tensor:
    """[T, K] the ranks that a token goes to, each once; ``ranks`` in the other places."""
    block = len(experts) // ranks
    local_TK = indices_TK - experts.start
    to_TK = torch.where((local_TK >= 0) & (local_TK < len(experts)), local_TK // block, ranks)
    to_TK = to_TK.sort(1).values
    again_TK = torch.zeros_like(to_TK, dtype=torch.bool)
    again_TK[:, 1:] = to_TK[:, 1:] == to_TK[:, :-1]
    return to_TK.masked_fill(again_TK, ranks)


def _block_of(experts: range, ranks: int, rank: int) -> range:
    size = len(experts) // ranks
    return experts[rank * size : (rank + 1) * size]


@dataclass(frozen=True)
class _Flight:
    """Tokens under way over one group."""

    index: RowMap
    """Of the rows that were sent, into the tokens that they are of."""
    input_splits: list[int] | None
    output_splits: list[int] | None
    group: dist.ProcessGroup
    parts: tuple[Arriving, Arriving, Arriving]
    num_assignments: int | None
    """Of the rows that arrive, to the experts of this rank's block; None where no one knows."""

    def land(self) -> _Tokens:
        """Wait for them."""
        return _Tokens(*(part.wait() for part in self.parts))

    def start_back(self, y_SD: Tensor) -> Callable[[], Tensor]:
        """Send sums home; the result, when called, waits and adds up each token's."""
        back = start_all_to_all(y_SD, self.output_splits, self.input_splits, self.group)
        return lambda: sum_rows(back.wait(), self.index)


def _take_off(
    tokens: _Tokens,
    index: RowMap,
    splits: tuple[list[int], list[int]] | None,
    group: dist.ProcessGroup,
    num_assignments: int | None,
    empty_R: Tensor | None = None,
    no_expert: int = 0,
) -> _Flight:
    indices = tokens.expert_indices_TK.index_select(0, index.source_R)
    if empty_R is not None:
        indices = indices.masked_fill(empty_R.unsqueeze(1), no_expert)
    input_splits, output_splits = splits or (None, None)
    parts = [
        start_all_to_all(part, input_splits, output_splits, group)
        for part in (
            take_rows(tokens.x_TD, index),
            indices,
            take_rows(tokens.expert_weights_TK, index),
        )
    ]
    return _Flight(
        index, input_splits, output_splits, group, (parts[0], parts[1], parts[2]), num_assignments
    )


def _plan(
    chunks: Sequence[_Tokens], experts: range, group: dist.ProcessGroup
) -> list[Callable[[], _Flight]]:
    """How each chunk is to travel, with one exchange of counts for all; call to let it go."""
    ranks, device = group.size(), chunks[0].x_TD.device
    block = len(experts) // ranks
    destinations = [_destinations(c.expert_indices_TK, experts, ranks) for c in chunks]
    # Rows, and the assignments that they bring, for each rank and chunk.
    sent = torch.zeros(ranks, len(chunks), 2, dtype=torch.int64, device=device)
    for i, (chunk, to_TK) in enumerate(zip(chunks, destinations, strict=True)):
        sent[:, i, 0] = count_tokens_per_expert(to_TK, ranks + 1)[:ranks]
        local_TK = chunk.expert_indices_TK - experts.start
        outside_TK = (local_TK < 0) | (local_TK >= len(experts))
        per_expert = count_tokens_per_expert(local_TK.masked_fill(outside_TK, len(experts)),
                                             len(experts) + 1)  # fmt: skip
        sent[:, i, 1] = per_expert[: len(experts)].view(ranks, block).sum(1)
    # One copy to the host for both, since that is where a CUDA stream must be waited for.
    both = torch.stack([sent, exchange_counts(sent, group)]).tolist()
    flights: list[Callable[[], _Flight]] = []
    for i, (chunk, to_TK) in enumerate(zip(chunks, destinations, strict=True)):
        splits = ([row[i][0] for row in both[0]], [row[i][0] for row in both[1]])
        order = sort_by_expert(to_TK)[: sum(splits[0])]
        source_R = order // max(to_TK.shape[1], 1)
        assignments = sum(row[i][1] for row in both[1])

        def go(
            chunk: _Tokens = chunk,
            source_R: Tensor = source_R,
            splits: tuple[list[int], list[int]] = splits,
            assignments: int = assignments,
        ) -> _Flight:
            index = row_map(source_R, len(chunk.x_TD))
            return _take_off(chunk, index, splits, group, assignments)

        flights.append(go)
    return flights


def _chunks(x_TD: Tensor, routed: RouterOutput, number: int) -> list[_Tokens]:
    """Cut into consecutive parts; as many on every rank, the later ones perhaps empty."""
    size = -(-len(x_TD) // number)
    cuts = [slice(i * size, (i + 1) * size) for i in range(number)]
    return [
        _Tokens(x_TD[cut], routed.expert_indices_TK[cut], routed.expert_weights_TK[cut])
        for cut in cuts
    ]


class AllToAllDispatcher:
    """Experts in equal blocks over the ranks of a group; rows travel by uneven all-to-all.

    Counts are exchanged once per layer; a rank may send or receive no rows at all. The worst case,
    every token of every rank sent to one: that rank receives as many rows as all ranks have tokens.

    With a second group it is hierarchical: rows cross from node to node over ``group`` (the ranks
    with this one's place within their node), once to a node, and then go on within it.

    Args:
        group: the ranks that share the experts; or of them those at this rank's place in each node.
        within: the ranks of this node; then the ranks of a node hold consecutive blocks of experts.
        chunks: parts of a call that travel one after another, while experts compute the last.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        within: dist.ProcessGroup | None = None,
        chunks: int = 1,
    ) -> None:
        self.group, self.within, self.chunks = group, within, chunks

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[Arrived]:
        """See :class:`Dispatcher`."""
        experts = range(len(routed.rows_per_expert_E))
        plans = _plan(_chunks(x_TD, routed, self.chunks), experts, self.group)
        return self._arrivals(plans, plans[0](), experts)

    def _arrivals(
        self, plans: list[Callable[[], _Flight]], flight: _Flight, experts: range
    ) -> Iterator[Arrived]:
        mine = _block_of(experts, self.group.size(), self.group.rank())
        for plan in [*plans[1:], None]:
            following = None if plan is None else plan()
            tokens, flights = flight.land(), [flight]
            block = mine
            if self.within is not None:
                flights.append(_plan([tokens], mine, self.within)[0]())
                tokens = flights[-1].land()
                block = _block_of(mine, self.within.size(), self.within.rank())
            yield Arrived(rows_of(*tokens, block, flights[-1].num_assignments), flights)
            if following is not None:
                flight = following

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        flights: list[_Flight] = arrived.ticket
        for flight in reversed(flights[1:]):
            y_SD = flight.start_back(y_SD)()
        return flights[0].start_back(y_SD)


class PaddedAllToAllDispatcher:
    """All-to-all of equal parts, whose sizes follow from the capacity and not from the routing.

    Nothing waits for an accelerator, and shapes are the same in every call. A rank sends each rank
    as many slots as can be filled: the tokens of a call, or what the capacity policy lets the
    experts of that rank take, if that is less. A call may have fewer than ``max_tokens_per_call``.

    Args:
        group: the ranks that share the experts.
        max_tokens_per_call: of one call, on any rank.
        room: tokens of a call -> the most that each expert takes of them; None for any number.
        chunks: as of :class:`AllToAllDispatcher`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        max_tokens_per_call: int,
        room: Callable[[int], Sequence[int] | None],
        chunks: int = 1,
    ) -> None:
        self.group, self.max_tokens_per_call, self.room, self.chunks = (
            group,
            max_tokens_per_call,
            room,
            chunks,
        )

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[Arrived]:
        """See :class:`Dispatcher`.

        Raises ValueError for more tokens than ``max_tokens_per_call``.
        """
        if len(x_TD) > self.max_tokens_per_call:
            raise ValueError(
                f"a call has {len(x_TD)} tokens: moe.max_tokens_per_call "
                f"({self.max_tokens_per_call}) must be at least as many"
            )
        experts = range(len(routed.rows_per_expert_E))
        chunks = _chunks(x_TD, routed, self.chunks)
        return self._arrivals(chunks, self._take_off(chunks[0], experts), experts)

    def _slots(self, experts: range, ranks: int) -> int:
        """Rows that a rank sends to each rank: one bound for all, so that parts are equal."""
        tokens = -(-self.max_tokens_per_call // self.chunks)
        room_E = self.room(self.max_tokens_per_call)
        if room_E is None:
            return tokens
        blocks = [_block_of(experts, ranks, rank) for rank in range(ranks)]
        return min(tokens, max(sum(room_E[e] for e in block) for block in blocks))

    def _take_off(self, tokens: _Tokens, experts: range) -> _Flight:
        ranks, E = self.group.size(), len(experts)
        x_TD, indices_TK, weights_TK = tokens
        if not len(x_TD):
            # There must be a row for empty slots to show: one that goes to no expert.
            x_TD = torch.cat([x_TD, x_TD.new_zeros(1, x_TD.shape[1])])
            indices_TK = indices_TK.new_full((1, indices_TK.shape[1]), E)
            weights_TK = torch.cat([weights_TK, weights_TK.new_zeros(1, weights_TK.shape[1])])
            tokens = _Tokens(x_TD, indices_TK, weights_TK)
        to_TK = _destinations(indices_TK, experts, ranks)
        order, counts = sort_by_expert(to_TK), count_tokens_per_expert(to_TK, ranks + 1)[:ranks]
        slot = torch.arange(self._slots(experts, ranks), device=order.device)
        first = (counts.cumsum(0) - counts).unsqueeze(1)
        places = (first + slot).clamp(max=len(order) - 1)
        empty_R = (slot >= counts.unsqueeze(1)).flatten()
        source_R = (order[places].flatten() // to_TK.shape[1]).masked_fill(empty_R, 0)
        index = row_map(source_R, len(x_TD))
        return _take_off(tokens, index, None, self.group, None, empty_R, E)

    def _arrivals(
        self, chunks: list[_Tokens], flight: _Flight, experts: range
    ) -> Iterator[Arrived]:
        ranks, rank = self.group.size(), self.group.rank()
        mine = _block_of(experts, ranks, rank)
        room_E = self.room(self.max_tokens_per_call)
        for i in range(len(chunks)):
            following = None
            if i + 1 < len(chunks):
                following = self._take_off(chunks[i + 1], experts)
            tokens = flight.land()
            length = tokens.expert_indices_TK.numel()
            if room_E is not None:
                length = min(length, ranks * sum(room_E[e] for e in mine))
            arrived = rows_of(*tokens, mine, length)
            yield Arrived(arrived, (flight, len(chunks[i].x_TD)))
            if following is not None:
                flight = following

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        flight, num_tokens = arrived.ticket
        finish = flight.start_back(y_SD)
        return lambda: finish()[:num_tokens]


class AllGatherDispatcher:
    """Every rank gets all tokens of the group, and sums over ranks bring the outputs home.

    For groups of a few ranks, where top_k is not much less than the number of ranks anyway.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[Arrived]:
        """See :class:`Dispatcher`."""
        experts = range(len(routed.rows_per_expert_E))
        T = len(x_TD)
        sizes = all_gather_rows(torch.tensor([T], device=x_TD.device), self.group, "ep")
        padding = int(sizes.max()) - T

        def everywhere(part: Tensor, fill: int = 0) -> Arriving:
            if padding:
                part = torch.cat([part, part.new_full((padding, part.shape[1]), fill)])
            return start_gather_rows(part, self.group, "ep")

        parts = [
            everywhere(x_TD),
            everywhere(routed.expert_indices_TK, len(experts)),
            everywhere(routed.expert_weights_TK),
        ]
        return self._arrival(parts, experts, T)

    def _arrival(self, parts: list[Arriving], experts: range, num_tokens: int) -> Iterator[Arrived]:
        mine = _block_of(experts, self.group.size(), self.group.rank())
        x_SD, indices_SK, weights_SK = (part.wait() for part in parts)
        yield Arrived(rows_of(x_SD, indices_SK, weights_SK, mine), num_tokens)

    def combine(self, y_SD: Tensor, arrived: Arrived) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        back = start_scatter_sums(y_SD, self.group, "ep")
        return lambda: back.wait()[: arrived.ticket]
