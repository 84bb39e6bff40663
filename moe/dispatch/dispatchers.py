"""Dispatch and combine: moving tokens to the ranks of their experts and back.

Legend: T tokens, D d_model, E experts, K top_k, S rows on this rank, R assignments of these rows.

A row is sent to a rank once, with the numbers and weights of its experts, however many of its
experts the rank holds. The rank sums the outputs of its experts, and returns one row. T tokens
therefore cost at most T · min(K, ranks) rows in each direction, and not T · K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.dispatch.transfer import Tokens, Transfer, start_transfer
from moe.rows import Rows, row_map, rows_of, sort_by_expert
from parallel.comm import (
    PendingRows,
    Wire,
    all_gather_rows,
    exchange_counts,
    start_gather_rows,
    start_scatter_sums,
)
from router import HoldsGroups, RouterOutput, count_tokens_per_expert


class DispatchedRows(NamedTuple):
    """Rows on the rank of the experts that compute them, and state for ``combine``."""

    rows: Rows
    handle: Any


class Dispatcher(Protocol):
    """How tokens reach experts. A dispatcher keeps no state between calls, for recomputation.

    Every rank of the group must call both methods, and take all parts of the iterator.
    """

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """Send every routed row to the ranks of its experts.

        The transfer of the first part has begun when this method returns. The iterator waits for a
        part, begins the transfer of the next part, and then gives the part. Parts are consecutive.
        """
        ...

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """Return the experts' sums of a part to their ranks. The result, when called, waits for the
        transfer and gives [tokens, D]."""
        ...


class LocalDispatcher:
    """For one rank that holds all experts: no row is sent. ``by_unit``: a call is one unit."""

    def __init__(self, by_unit: bool = False) -> None:
        self.by_unit = by_unit

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`Dispatcher`."""
        indices_TK, weights_TK = routed.expert_indices_TK, routed.expert_weights_TK
        experts = range(len(routed.rows_per_expert_E))
        length = indices_TK.numel() if routed.dropped_TK is None else None
        units = [len(x_TD)] if self.by_unit else None
        yield DispatchedRows(rows_of(x_TD, indices_TK, weights_TK, experts, length, units), None)

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        return lambda: y_SD


def check_room(x_TD: Tensor, max_tokens_per_call: int) -> None:
    """Raise ValueError for more tokens than a call may have."""
    if len(x_TD) > max_tokens_per_call:
        raise ValueError(
            f"a call has {len(x_TD)} tokens: max_tokens_per_call ({max_tokens_per_call}) must be "
            f"at least as many"
        )


def _destinations(indices_TK: Tensor, experts: range, ranks: int) -> Tensor:
    """[T, K] the ranks that each token is sent to, each once; ``ranks`` in the other places."""
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


def _plan(
    chunks: Sequence[Tokens],
    experts: range,
    group: dist.ProcessGroup,
    wire: Wire | None = None,
) -> list[Callable[[], Transfer]]:
    """A transfer for each chunk, which a call begins; counts are exchanged once for all chunks."""
    ranks, device = group.size(), chunks[0].x_TD.device
    block = len(experts) // ranks
    destinations = [_destinations(c.expert_indices_TK, experts, ranks) for c in chunks]
    # Rows, and their assignments, for each rank and chunk.
    sent = torch.zeros(ranks, len(chunks), 2, dtype=torch.int64, device=device)
    for i, (chunk, to_TK) in enumerate(zip(chunks, destinations, strict=True)):
        sent[:, i, 0] = count_tokens_per_expert(to_TK, ranks + 1)[:ranks]
        local_TK = chunk.expert_indices_TK - experts.start
        outside_TK = (local_TK < 0) | (local_TK >= len(experts))
        per_expert = count_tokens_per_expert(local_TK.masked_fill(outside_TK, len(experts)),
                                             len(experts) + 1)  # fmt: skip
        sent[:, i, 1] = per_expert[: len(experts)].view(ranks, block).sum(1)
    # One copy to the host for both tensors: the copy waits for the CUDA stream.
    both = torch.stack([sent, exchange_counts(sent, group)]).tolist()
    transfers: list[Callable[[], Transfer]] = []
    for i, (chunk, to_TK) in enumerate(zip(chunks, destinations, strict=True)):
        splits = ([row[i][0] for row in both[0]], [row[i][0] for row in both[1]])
        order = sort_by_expert(to_TK)[: sum(splits[0])]
        source_R = order // max(to_TK.shape[1], 1)
        assignments = sum(row[i][1] for row in both[1])

        def go(
            chunk: Tokens = chunk,
            source_R: Tensor = source_R,
            splits: tuple[list[int], list[int]] = splits,
            assignments: int = assignments,
        ) -> Transfer:
            index = row_map(source_R, len(chunk.x_TD))
            return start_transfer(chunk, index, splits, group, assignments, wire=wire)

        transfers.append(go)
    return transfers


def _chunks(x_TD: Tensor, routed: RouterOutput, number: int) -> list[Tokens]:
    """Consecutive parts, of an equal number on every rank; the last parts may be empty."""
    size = -(-len(x_TD) // number)
    cuts = [slice(i * size, (i + 1) * size) for i in range(number)]
    return [
        Tokens(x_TD[cut], routed.expert_indices_TK[cut], routed.expert_weights_TK[cut])
        for cut in cuts
    ]


class AllToAllDispatcher(HoldsGroups):
    """All-to-all with splits of the exact size; the ranks of a group hold equal blocks of experts.

    Counts are exchanged once per layer, and within a node once per chunk. A rank may send or
    receive no rows. In the worst case every token of every rank is sent to one rank, which receives
    as many rows as all ranks have tokens.

    With a second group the dispatch is hierarchical: a row is sent to a node once, over ``group``
    (the ranks at this rank's place in each node), and is then sent to the ranks within the node.

    Args:
        group: the ranks that share the experts; for a hierarchical dispatch only the ranks at this
            rank's place in each node.
        within: for a hierarchical dispatch the ranks of this node; the ranks of a node hold
            consecutive blocks of experts.
        chunks: parts of a call; one part is in transfer while experts compute the part before.
        by_unit: count rows by unit, each rank's call, for exact sums; one group and one chunk.
        wire: how rows are written on their way to experts.
    """

    GROUPS = ("group", "within")

    def __init__(
        self,
        group: dist.ProcessGroup,
        within: dist.ProcessGroup | None = None,
        chunks: int = 1,
        by_unit: bool = False,
        wire: Wire | None = None,
    ) -> None:
        assert not by_unit or (within is None and chunks == 1), "units would be cut"
        self.group, self.within, self.chunks = group, within, chunks
        self.by_unit, self.wire = by_unit, wire

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`Dispatcher`."""
        experts = range(len(routed.rows_per_expert_E))
        plans = _plan(_chunks(x_TD, routed, self.chunks), experts, self.group, self.wire)
        return self._dispatched(plans, plans[0](), experts)

    def _dispatched(
        self, plans: list[Callable[[], Transfer]], transfer: Transfer, experts: range
    ) -> Iterator[DispatchedRows]:
        mine = _block_of(experts, self.group.size(), self.group.rank())
        for plan in [*plans[1:], None]:
            following = None if plan is None else plan()
            tokens, transfers = transfer.wait(), [transfer]
            block = mine
            if self.within is not None:
                transfers.append(_plan([tokens], mine, self.within, self.wire)[0]())
                tokens = transfers[-1].wait()
                block = _block_of(mine, self.within.size(), self.within.rank())
            units = transfer.output_splits if self.by_unit else None
            rows = rows_of(*tokens, block, transfers[-1].num_assignments, units)
            yield DispatchedRows(rows, transfers)
            if following is not None:
                transfer = following

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        transfers: list[Transfer] = dispatched.handle
        for transfer in reversed(transfers[1:]):
            y_SD = transfer.start_return(y_SD)()
        return transfers[0].start_return(y_SD)


class PaddedAllToAllDispatcher(HoldsGroups):
    """All-to-all with equal splits, whose sizes follow from the capacity and not from the routing.

    Nothing waits for an accelerator. All calls have equal shapes, until a plan of straggler-aware
    capacity changes. A rank sends the smaller of two numbers of slots to each rank:
    ``max_tokens_per_call``, or the most assignments that the capacity policy allows the experts of
    one rank. A call may have fewer tokens.

    Args:
        group: the ranks that share the experts.
        max_tokens_per_call: the most tokens of one call on any rank.
        room: from the tokens of a call to the most assignments of each expert; None for no bound.
        chunks: see :class:`AllToAllDispatcher`.
        wire: see :class:`AllToAllDispatcher`.
    """

    GROUPS = ("group",)

    def __init__(
        self,
        group: dist.ProcessGroup,
        max_tokens_per_call: int,
        room: Callable[[int], Sequence[int] | None],
        chunks: int = 1,
        wire: Wire | None = None,
    ) -> None:
        self.group, self.max_tokens_per_call, self.room = group, max_tokens_per_call, room
        self.chunks, self.wire = chunks, wire

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`Dispatcher`.

        Raises ValueError for more tokens than ``max_tokens_per_call``.
        """
        check_room(x_TD, self.max_tokens_per_call)
        experts = range(len(routed.rows_per_expert_E))
        chunks = _chunks(x_TD, routed, self.chunks)
        return self._dispatched(chunks, self._start_transfer(chunks[0], experts), experts)

    def _slots(self, experts: range, ranks: int) -> int:
        """The rows that a rank sends to each rank, equal for all ranks."""
        tokens = -(-self.max_tokens_per_call // self.chunks)
        room_E = self.room(self.max_tokens_per_call)
        if room_E is None:
            return tokens
        blocks = [_block_of(experts, ranks, rank) for rank in range(ranks)]
        return min(tokens, max(sum(room_E[e] for e in block) for block in blocks))

    def _start_transfer(self, tokens: Tokens, experts: range) -> Transfer:
        ranks, E = self.group.size(), len(experts)
        tokens = tokens.at_least_one(E)  # empty slots need a row to refer to
        x_TD, indices_TK, _ = tokens
        to_TK = _destinations(indices_TK, experts, ranks)
        order, counts = sort_by_expert(to_TK), count_tokens_per_expert(to_TK, ranks + 1)[:ranks]
        slot = torch.arange(self._slots(experts, ranks), device=order.device)
        first = (counts.cumsum(0) - counts).unsqueeze(1)
        places = (first + slot).clamp(max=len(order) - 1)
        empty_R = (slot >= counts.unsqueeze(1)).flatten()
        source_R = (order[places].flatten() // to_TK.shape[1]).masked_fill(empty_R, 0)
        index = row_map(source_R, len(x_TD))
        return start_transfer(tokens, index, None, self.group, None, empty_R, E, wire=self.wire)

    def _dispatched(
        self, chunks: list[Tokens], transfer: Transfer, experts: range
    ) -> Iterator[DispatchedRows]:
        ranks, rank = self.group.size(), self.group.rank()
        mine = _block_of(experts, ranks, rank)
        room_E = self.room(self.max_tokens_per_call)
        for i in range(len(chunks)):
            following = None
            if i + 1 < len(chunks):
                following = self._start_transfer(chunks[i + 1], experts)
            tokens = transfer.wait()
            length = tokens.expert_indices_TK.numel()
            if room_E is not None:
                length = min(length, ranks * sum(room_E[e] for e in mine))
            dispatched = rows_of(*tokens, mine, length)
            yield DispatchedRows(dispatched, (transfer, len(chunks[i].x_TD)))
            if following is not None:
                transfer = following

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        transfer, num_tokens = dispatched.handle
        finish = transfer.start_return(y_SD)
        return lambda: finish()[:num_tokens]


class AllGatherDispatcher(HoldsGroups):
    """All-gather of all tokens of the group, and a reduce-scatter of the outputs.

    For groups of a few ranks, where top_k is nearly the number of ranks.
    """

    GROUPS = ("group",)

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`Dispatcher`."""
        experts = range(len(routed.rows_per_expert_E))
        T = len(x_TD)
        sizes = all_gather_rows(torch.tensor([T], device=x_TD.device), self.group, "ep")
        padding = int(sizes.max()) - T

        def everywhere(part: Tensor, fill: int = 0) -> PendingRows:
            if padding:
                part = torch.cat([part, part.new_full((padding, part.shape[1]), fill)])
            return start_gather_rows(part, self.group, "ep")

        parts = [
            everywhere(x_TD),
            everywhere(routed.expert_indices_TK, len(experts)),
            everywhere(routed.expert_weights_TK),
        ]
        return self._gathered(parts, experts, T)

    def _gathered(
        self, parts: list[PendingRows], experts: range, num_tokens: int
    ) -> Iterator[DispatchedRows]:
        mine = _block_of(experts, self.group.size(), self.group.rank())
        x_SD, indices_SK, weights_SK = (part.wait() for part in parts)
        yield DispatchedRows(rows_of(x_SD, indices_SK, weights_SK, mine), num_tokens)

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        back = start_scatter_sums(y_SD, self.group, "ep")
        return lambda: back.wait()[: dispatched.handle]
