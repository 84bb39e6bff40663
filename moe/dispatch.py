"""Moving tokens to their experts and back.

Legend: T tokens, D d_model, E experts, K top_k, N routed rows (T·K less those dropped), R rows
received.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from moe.permute import permute, reorder, sort_by_expert, unpermute
from parallel import all_to_all, exchange_counts
from router import RouterOutput


@dataclass(frozen=True)
class Dispatched:
    """Rows beside the experts that compute them."""

    x_RD: Tensor
    """[R, D], sorted by the experts of this rank."""
    weights_R: Tensor
    """[R] float32, what each row's output is multiplied by."""
    rows_per_expert_E: Tensor
    """[experts of this rank] int64, sums to R."""
    ticket: Any
    """What the same dispatcher needs for the way back; lives as long as one forward."""


class Dispatcher(Protocol):
    """How tokens reach experts. Stateless between calls, so recomputation is safe."""

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Dispatched:
        """Bring every routed row to the rank of its expert."""
        ...

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """Bring the experts' outputs home and sum them per token: [T, D]."""
        ...


@dataclass(frozen=True)
class _LocalTicket:
    order_N: Tensor
    inverse_N: Tensor
    top_k: int


class LocalDispatcher:
    """Every expert is here: a sort, and nothing crosses ranks."""

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Dispatched:
        """See :class:`Dispatcher`."""
        order_N, inverse_N = sort_by_expert(routed.expert_indices_TK)
        if routed.dropped_TK is not None:
            order_N = order_N[: int(routed.rows_per_expert_E.sum())]
        top_k = routed.expert_indices_TK.shape[1]
        return Dispatched(
            x_RD=permute(x_TD, order_N, inverse_N, top_k),
            weights_R=reorder(routed.expert_weights_TK.flatten(), order_N),
            rows_per_expert_E=routed.rows_per_expert_E,
            ticket=_LocalTicket(order_N, inverse_N, top_k),
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """See :class:`Dispatcher`."""
        ticket: _LocalTicket = dispatched.ticket
        return unpermute(y_RD, ticket.order_N, ticket.inverse_N, ticket.top_k)


@dataclass(frozen=True)
class _AllToAllTicket:
    local: Dispatched
    input_splits: list[int]
    output_splits: list[int]
    order_R: Tensor
    inverse_R: Tensor


class AllToAllDispatcher:
    """Experts in equal blocks over the ranks of a group; rows travel by uneven all-to-all.

    Counts are exchanged once per layer; a rank may send or receive no rows at all.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._local = LocalDispatcher()

    def dispatch(self, x_TD: Tensor, routed: RouterOutput) -> Dispatched:
        """See :class:`Dispatcher`. Every rank of the group must call."""
        local = self._local.dispatch(x_TD, routed)
        ranks = self.group.size()
        sent_E = routed.rows_per_expert_E
        received = exchange_counts(sent_E, self.group)  # [ranks, experts of this rank]
        # One copy to the host for both, since that is where a CUDA stream must be waited for.
        splits = torch.stack([sent_E.view(ranks, -1).sum(1), received.sum(1)]).tolist()
        input_splits, output_splits = splits[0], splits[1]
        x_RD = all_to_all(local.x_RD, input_splits, output_splits, self.group)
        weights_R = all_to_all(local.weights_R, input_splits, output_splits, self.group)
        # Rows arrive by rank, then by expert; the experts want them by expert, then by rank.
        num_local_experts = received.shape[1]
        expert_of_row_R = torch.repeat_interleave(
            torch.arange(num_local_experts, device=received.device).repeat(ranks),
            received.flatten(),
            output_size=sum(output_splits),
        )
        order_R, inverse_R = sort_by_expert(expert_of_row_R.unsqueeze(1))
        return Dispatched(
            x_RD=reorder(x_RD, order_R),
            weights_R=reorder(weights_R, order_R),
            rows_per_expert_E=received.sum(0),
            ticket=_AllToAllTicket(local, input_splits, output_splits, order_R, inverse_R),
        )

    def combine(self, y_RD: Tensor, dispatched: Dispatched) -> Tensor:
        """See :class:`Dispatcher`. Every rank of the group must call."""
        t: _AllToAllTicket = dispatched.ticket
        y_ND = all_to_all(reorder(y_RD, t.inverse_R), t.output_splits, t.input_splits, self.group)
        return self._local.combine(y_ND, t.local)
