"""Collectives with gradients, and the few plain ones that the rest of the house uses.

Legend: R rows received, N rows sent, D d_model, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class _Exchange:
    """One all-to-all under way, and later the one that takes its gradient back."""

    def __init__(
        self,
        input_splits: list[int] | None,
        output_splits: list[int] | None,
        group: dist.ProcessGroup,
    ) -> None:
        self.input_splits, self.output_splits, self.group = input_splits, output_splits, group
        self.work: Any = None
        self.sent: Tensor | None = None
        self.grad_work: Any = None
        self.grad_ND: Tensor | None = None

    def start(self, x_ND: Tensor) -> Tensor:
        rows = len(x_ND) if self.output_splits is None else sum(self.output_splits)
        out_RD = x_ND.new_empty(rows, *x_ND.shape[1:])
        self.sent = x_ND  # until it has left
        self.work = dist.all_to_all_single(
            out_RD, x_ND, self.output_splits, self.input_splits, group=self.group, async_op=True
        )
        return out_RD

    def start_back(self, grad_RD: Tensor) -> None:
        # The transpose of "send these rows there" is "send their gradients back".
        rows = len(grad_RD) if self.input_splits is None else sum(self.input_splits)
        self.grad_ND = grad_RD.new_empty(rows, *grad_RD.shape[1:])
        self.grad_work = dist.all_to_all_single(
            self.grad_ND, grad_RD, self.input_splits, self.output_splits,
            group=self.group, async_op=True,
        )  # fmt: skip


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.start(x_ND.contiguous())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, None]:
        exchange = ctx.exchange
        exchange.grad_work.wait()
        grad_ND, exchange.grad_work, exchange.grad_ND = exchange.grad_ND, None, None
        return grad_ND, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out_RD: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.work.wait()
        # It holds what it received, which holds the graph, which holds it: a circle that nothing
        # collects, since it runs through C++.
        exchange.work = exchange.sent = None
        return out_RD.view_as(out_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        # What waits in the forward starts in the backward, and the other way round: whatever was
        # computed between the two is between them again.
        ctx.exchange.start_back(grads[0].contiguous())
        return grads[0], None


class Arriving:
    """Rows that are on their way."""

    def __init__(self, out_RD: Tensor, exchange: _Exchange) -> None:
        self._out, self._exchange = out_RD, exchange

    def wait(self) -> Tensor:
        """[R, ...] once they are here; call it once."""
        out: Tensor = _Wait.apply(self._out, self._exchange)
        return out


def start_all_to_all(
    x_ND: Tensor,
    input_splits: list[int] | None,
    output_splits: list[int] | None,
    group: dist.ProcessGroup,
) -> Arriving:
    """:func:`all_to_all` without waiting; its gradient overlaps what the forward overlapped."""
    exchange = _Exchange(input_splits, output_splits, group)
    return Arriving(_Start.apply(x_ND, exchange), exchange)


def all_to_all(
    x_ND: Tensor,
    input_splits: list[int] | None,
    output_splits: list[int] | None,
    group: dist.ProcessGroup,
) -> Tensor:
    """Send ``input_splits[r]`` rows to each rank r, in order; receive ``output_splits[r]`` from it.

    Args:
        x_ND: [sum(input_splits), ...] rows, those for rank 0 first. Zero rows are ordinary.
        input_splits: rows for each rank of ``group``; None for equal parts.
        output_splits: rows from each rank; it must be what that rank's input_splits say.
        group: the ranks that take part; every one must call.

    Returns:
        [sum(output_splits), ...] rows, those from rank 0 first. Differentiable, once: the backward
        sends each row's gradient to the row's origin.
    """
    return start_all_to_all(x_ND, input_splits, output_splits, group).wait()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x_ND.new_empty(group.size() * len(x_ND), *x_ND.shape[1:])
        _all_gather(out, x_ND.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        return _reduce_scatter_rows(grads[0], ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter_rows(x_RD, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad,) = grads
        out = grad.new_empty(ctx.group.size() * len(grad), *grad.shape[1:])
        _all_gather(out, grad.contiguous(), group=ctx.group)
        return out, None


def _reduce_scatter_rows(x_RD: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x_RD.new_empty(len(x_RD) // group.size(), *x_RD.shape[1:])
    _reduce_scatter(out, x_RD.contiguous(), group=group)
    return out


def gather_rows(x_ND: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[N, ...], N alike on all ranks -> [ranks · N, ...] on every one, in rank order.

    The gradient of a row is the sum of all ranks' gradients of it.
    """
    out: Tensor = _AllGather.apply(x_ND, group)
    return out


def scatter_sums(x_RD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[ranks · N, ...] -> [N, ...]: the r-th block, summed over ranks, on rank r."""
    out: Tensor = _ReduceScatter.apply(x_RD, group)
    return out


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's r-th row to rank r: [ranks, ...] integers, by rank sent to -> by rank sent from.

    No gradient; every rank of ``group`` must call.
    """
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    return received


def all_gather_rows(row_V: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """[V] on each rank of a group, or of all -> [ranks, V] on every one, in rank order."""
    ranks = dist.get_world_size(group)
    rows = row_V.new_empty(ranks * row_V.numel())
    _all_gather(rows, row_V.contiguous(), group=group)
    return rows.view(ranks, -1)


# torch 2.13 renamed the tensor forms of these and warns on the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
