"""The dispatcher ``padded_all_to_all``: all-to-all with equal splits, whatever the routing.

Legend: T tokens, D d_model, E experts, K top_k, S rows on this rank, R rows that are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from moe.config import DISPATCHERS
from moe.dispatch.dispatchers import (
    DispatchedRows,
    Dispatcher,
    DispatchSetup,
    block_of,
    check_num_tokens,
    chunks_of,
    destinations,
)
from moe.dispatch.transfer import Tokens, Transfer, begun_ahead, start_transfer
from moe.rows import row_map, rows_of, sort_and_count
from router import RouterOutput


class PaddedAllToAllDispatcher(Dispatcher):
    """All-to-all with equal splits, whose sizes follow from the capacity and not from the routing.

    Nothing waits for an accelerator. All calls have equal shapes, until a plan of straggler-aware
    capacity changes. A rank sends the smaller of two numbers of slots to each rank:
    ``max_tokens_per_call``, or the most assignments that the capacity policy allows the experts of
    one rank. A call may have fewer tokens. It is cut into chunks, as in
    :class:`moe.dispatch.all_to_all.AllToAllDispatcher`.
    """

    traits = DISPATCHERS["padded_all_to_all"]

    def __init__(self, setup: DispatchSetup) -> None:
        super().__init__(setup)
        self.max_tokens_per_call = setup.config.max_tokens_per_call
        self.max_assignments_per_expert = setup.max_assignments_per_expert
        self.chunks, self.wire = setup.config.overlap_chunks, setup.wire

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`Dispatcher`.

        Raises ValueError for more tokens than ``max_tokens_per_call``.
        """
        check_num_tokens(x_TD, self.max_tokens_per_call)
        experts = range(len(routed.rows_per_expert_E))
        chunks = chunks_of(x_TD, routed, self.chunks)
        later = (partial(self._start_transfer, chunk, experts) for chunk in chunks[1:])
        begun = begun_ahead(self._start_transfer(chunks[0], experts), later)
        return self._dispatched(zip(chunks, begun, strict=True), experts)

    def _slots(self, experts: range, ranks: int) -> int:
        """The rows that a rank sends to each rank, equal for all ranks."""
        tokens = -(-self.max_tokens_per_call // self.chunks)
        most_E = self.max_assignments_per_expert(self.max_tokens_per_call)
        if most_E is None:
            return tokens
        blocks = [block_of(experts, ranks, rank) for rank in range(ranks)]
        return min(tokens, max(sum(most_E[e] for e in block) for block in blocks))

    def _start_transfer(self, tokens: Tokens, experts: range) -> Transfer:
        ranks, E = self.group.size(), len(experts)
        tokens = tokens.at_least_one(E)  # empty slots need a row to refer to
        x_TD, indices_TK, *_ = tokens
        to_TK = destinations(indices_TK, experts, ranks)
        order, counts = sort_and_count(to_TK, ranks + 1)
        counts = counts[1 : ranks + 1]
        slot = torch.arange(self._slots(experts, ranks), device=order.device)
        first = (counts.cumsum(0) - counts).unsqueeze(1)
        positions = (first + slot).clamp(max=len(order) - 1)
        empty_R = (slot >= counts.unsqueeze(1)).flatten()
        source_R = (order[positions].flatten() // to_TK.shape[1]).masked_fill(empty_R, 0)
        index = row_map(source_R, len(x_TD))
        return start_transfer(tokens, index, None, self.group, None, empty_R, E, wire=self.wire)

    def _dispatched(
        self, begun: Iterator[tuple[Tokens, Transfer]], experts: range
    ) -> Iterator[DispatchedRows]:
        ranks, rank = self.group.size(), self.group.rank()
        mine = block_of(experts, ranks, rank)
        most_E = self.max_assignments_per_expert(self.max_tokens_per_call)
        for chunk, transfer in begun:
            tokens = transfer.wait()
            length = tokens.expert_indices_TK.numel()
            if most_E is not None:
                length = min(length, ranks * sum(most_E[e] for e in mine))
            dispatched = rows_of(*tokens[:3], mine, length)
            yield DispatchedRows(dispatched, (transfer, len(chunk.x_TD)))

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        transfer, num_tokens = dispatched.handle
        finish = transfer.start_return(y_SD)
        return lambda: finish()[:num_tokens]
