"""All-to-all with splits of the exact size: in one group, ``all_to_all``, or ``hierarchical``.

Legend: T tokens, D d_model, K top_k, S rows on this rank, R rows that are sent, G ranks of the
group, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe.config import DISPATCHERS
from moe.dispatch.dispatchers import (
    DispatchedRows,
    Dispatcher,
    DispatchSetup,
    block_of,
    chunks_of,
    destinations,
)
from moe.dispatch.transfer import Tokens, Transfer, begun_ahead, start_transfer
from moe.kernels import sort_assignments
from moe.rows import RowMap, row_map, rows_of, sort_by_expert, sorted_index, sorts_both_ways
from parallel.comm import Wire, exchange_counts
from router import HostRead, RouterOutput, count_tokens_per_expert
from router.kernels import SortedAssignments


class _RowsToRanks:
    """The rows of a chunk that are sent to each rank, those for rank 0 first."""

    def __init__(self, chunk: Tokens, experts: range, ranks: int) -> None:
        indices_TK, self._chunk, self._ranks = chunk.expert_indices_TK, chunk, ranks
        self._both: SortedAssignments | None = None
        if sorts_both_ways(chunk.x_TD, indices_TK, ranks):
            block = len(experts) // ranks
            self._both = sort_assignments(indices_TK, experts.start, block, ranks, once=True)
            self.rows_G = self._both.counts_B1[1 : ranks + 1]
        else:
            self._to_TK = destinations(indices_TK, experts, ranks)
            self.rows_G = count_tokens_per_expert(self._to_TK, ranks + 1)[:ranks]
        """[G] int64: the rows for each rank."""

    def sort(self) -> None:
        """Sort the rows by rank, without their number."""
        if self._both is None:
            self._order_N = sort_by_expert(self._to_TK, self._ranks + 1)

    def index(self, num_rows: int) -> RowMap:
        """From the rows to their tokens, once they are sorted and their number is known."""
        if self._both is not None:
            return sorted_index(self._both, num_rows)
        columns = max(self._to_TK.shape[1], 1)
        return row_map(self._order_N[:num_rows] // columns, len(self._chunk.x_TD))


@dataclass(frozen=True)
class PlannedTransfer:
    """The transfer of a chunk, whose sizes all ranks know, not yet begun."""

    tokens: Tokens
    to_ranks: _RowsToRanks
    sent_rows_G: list[int]
    received_rows_G: list[int]
    received_assignments: int
    """The assignments of the rows that arrive to this rank's experts."""
    group: dist.ProcessGroup
    wire: Wire | None

    def start(self) -> Transfer:
        """Begin the transfer."""
        index = self.to_ranks.index(sum(self.sent_rows_G))
        splits = (self.sent_rows_G, self.received_rows_G)
        return start_transfer(
            self.tokens, index, splits, self.group, self.received_assignments, wire=self.wire
        )


def plan_transfers(
    chunks: list[Tokens],
    experts: range,
    group: dist.ProcessGroup,
    wire: Wire | None = None,
    rows_per_expert_E: Tensor | None = None,
) -> list[PlannedTransfer]:
    """A transfer for each chunk; counts are exchanged once for all chunks.

    Args:
        chunks: the tokens, of an equal number of chunks on every rank.
        experts: the experts of the group, in equal blocks for its ranks.
        group: the ranks; every rank of the group must call.
        wire: how rows are written on their way.
        rows_per_expert_E: [E] the assignments of all chunks to ``experts``; None where unknown.
    """
    ranks = group.size()
    to_ranks = [_RowsToRanks(chunk, experts, ranks) for chunk in chunks]
    rows_GC = [rows.rows_G for rows in to_ranks]
    if rows_per_expert_E is not None and len(chunks) == 1:
        assignments_GC = [rows_per_expert_E.view(ranks, -1).sum(1)]
    else:
        assignments_GC = [_assignments_of_ranks(c, experts, ranks) for c in chunks]
    sent_GC2 = torch.stack([torch.stack(rows_GC, 1), torch.stack(assignments_GC, 1)], 2)
    both = HostRead(torch.stack([sent_GC2, exchange_counts(sent_GC2, group)]))
    # A device sorts while the counts travel to the host.
    for rows in to_ranks:
        rows.sort()
    (sent_rows_GC, _), (received_rows_GC, received_assignments_GC) = (
        (counts_GC2[..., 0], counts_GC2[..., 1]) for counts_GC2 in both.wait()
    )
    planned = []
    for i, (chunk, rows) in enumerate(zip(chunks, to_ranks, strict=True)):
        planned.append(
            PlannedTransfer(
                chunk,
                rows,
                sent_rows_GC[:, i].tolist(),
                received_rows_GC[:, i].tolist(),
                int(received_assignments_GC[:, i].sum()),
                group,
                wire,
            )
        )
    return planned


def _assignments_of_ranks(chunk: Tokens, experts: range, ranks: int) -> Tensor:
    """[G] int64: the assignments of a chunk to the experts of each rank."""
    local_TK = chunk.expert_indices_TK - experts.start
    outside_TK = (local_TK < 0) | (local_TK >= len(experts))
    local_TK = local_TK.masked_fill(outside_TK, len(experts))
    return count_tokens_per_expert(local_TK, len(experts) + 1)[:-1].view(ranks, -1).sum(1)


class AllToAllDispatcher(Dispatcher):
    """All-to-all with splits of the exact size; the ranks of a group hold equal blocks of experts.

    Counts are exchanged once per layer, and within a node once per chunk. A rank may send or
    receive no rows. In the worst case every token of every rank is sent to one rank, which receives
    as many rows as all ranks have tokens.

    A call is cut into chunks; one is in transfer while experts compute the chunk before.
    """

    traits = DISPATCHERS["all_to_all"]
    GROUPS = ("group", "within")

    def __init__(self, setup: DispatchSetup) -> None:
        super().__init__(setup)
        self.within: dist.ProcessGroup | None = None
        self.chunks, self.wire = setup.config.overlap_chunks, setup.wire
        self.counts_units = False

    def by_unit(self) -> AllToAllDispatcher:
        """See :class:`Dispatcher`."""
        assert self.within is None, "two groups do not keep rows apart by unit"
        assert self.chunks == 1, "units would be cut"
        self.counts_units = True
        return self

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`Dispatcher`."""
        experts = range(len(routed.rows_per_expert_E))
        chunks = chunks_of(x_TD, routed, self.chunks)
        planned = plan_transfers(chunks, experts, self.group, self.wire, routed.rows_per_expert_E)
        begun = begun_ahead(planned[0].start(), (transfer.start for transfer in planned[1:]))
        return self._dispatched(begun, experts, 1 if routed.places is None else routed.places.parts)

    def _dispatched(
        self, begun: Iterator[Transfer], experts: range, parts: int
    ) -> Iterator[DispatchedRows]:
        mine = block_of(experts, self.group.size(), self.group.rank())
        for transfer in begun:
            tokens, transfers = transfer.wait(), [transfer]
            block = mine
            if self.within is not None:
                transfers.append(plan_transfers([tokens], mine, self.within, self.wire)[0].start())
                tokens = transfers[-1].wait()
                block = block_of(mine, self.within.size(), self.within.rank())
            units = None
            if self.counts_units:
                splits = transfer.output_splits
                assert splits is not None
                units = [sum(splits[i : i + parts]) for i in range(0, len(splits), parts)]
            rows = rows_of(
                *tokens[:3], block, transfers[-1].num_assignments, units, tokens.positions_T
            )
            yield DispatchedRows(rows, transfers)

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        transfers: list[Transfer] = dispatched.handle
        for transfer in reversed(transfers[1:]):
            y_SD = transfer.start_return(y_SD)()
        return transfers[0].start_return(y_SD)


class HierarchicalDispatcher(AllToAllDispatcher):
    """The dispatcher ``hierarchical``: a row is sent to a node once, over the ranks at this rank's
    place in each node, and is then sent to the ranks within the node, which hold consecutive blocks
    of experts.

    Raises ValueError without groups of nodes.
    """

    traits = DISPATCHERS["hierarchical"]

    def __init__(self, setup: DispatchSetup) -> None:
        if setup.across_nodes is None or setup.within_node is None:
            raise ValueError(
                "dispatcher (hierarchical) must have expert ranks on more than one node, and "
                "more than one on each, in equal numbers, and be given ParallelDims.ep_node_meshes "
                "of meshes built with ranks_per_node; or use all_to_all"
            )
        super().__init__(setup)
        self.group, self.within = setup.across_nodes, setup.within_node
