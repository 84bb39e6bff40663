"""The dispatcher ``all_gather``: every rank gets all tokens.

Legend: T tokens, D d_model, K top_k, S rows on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from moe.config import DISPATCHERS
from moe.dispatch.dispatchers import DispatchedRows, Dispatcher, block_of
from moe.rows import rows_of
from parallel.comm import PendingRows, all_gather_rows, start_gather_rows, start_scatter_sums
from router import HostRead, RouterOutput


class AllGatherDispatcher(Dispatcher):
    """All-gather of all tokens of the group, and a reduce-scatter of the outputs.

    For groups of a few ranks, where top_k is nearly the number of ranks.
    """

    traits = DISPATCHERS["all_gather"]

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Iterator[DispatchedRows]:
        """See :class:`Dispatcher`."""
        experts = range(len(routed.rows_per_expert_E))
        T = len(x_TD)
        own = torch.full((1,), T, dtype=torch.int64, device=x_TD.device)
        sizes = HostRead(all_gather_rows(own, self.group, "ep"))
        padding = int(sizes.wait().max()) - T

        def everywhere(rows: Tensor, fill: int = 0) -> PendingRows:
            if padding:
                rows = torch.cat([rows, rows.new_full((padding, rows.shape[1]), fill)])
            return start_gather_rows(rows, self.group, "ep")

        pending = [
            everywhere(x_TD),
            everywhere(routed.expert_indices_TK, len(experts)),
            everywhere(routed.expert_weights_TK),
        ]
        return self._gathered(pending, experts, T)

    def _gathered(
        self, pending: list[PendingRows], experts: range, num_tokens: int
    ) -> Iterator[DispatchedRows]:
        mine = block_of(experts, self.group.size(), self.group.rank())
        x_SD, indices_SK, weights_SK = (rows.wait() for rows in pending)
        yield DispatchedRows(rows_of(x_SD, indices_SK, weights_SK, mine), num_tokens)

    def combine(self, y_SD: Tensor, dispatched: DispatchedRows) -> Callable[[], Tensor]:
        """See :class:`Dispatcher`."""
        back = start_scatter_sums(y_SD, self.group, "ep")
        return lambda: back.wait()[: dispatched.handle]
