"""Collectives with gradients, and the few plain ones that the rest of the house uses.

Legend: R rows received, N rows sent, D d_model, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.comm_watch import Kind, Parallelism, Waitable, watched

_Send = Callable[[Tensor], tuple[Tensor, Waitable]]
"""Start a collective: the rows that leave -> those that will have come, and the work under way."""


class _Exchange:
    """One collective under way, and later the one that takes its gradient back."""

    def __init__(self, there: _Send, back: _Send) -> None:
        self.there, self.back = there, back
        self.work: Any = None
        self.sent: Tensor | None = None
        self.grad_work: Any = None
        self.grad_ND: Tensor | None = None

    def start(self, x_ND: Tensor) -> Tensor:
        self.sent = x_ND  # until it has left
        out_RD, self.work = self.there(x_ND)
        return out_RD

    def start_back(self, grad_RD: Tensor) -> None:
        self.grad_ND, self.grad_work = self.back(grad_RD)


def _all_to_all(
    input_splits: list[int] | None, output_splits: list[int] | None, group: dist.ProcessGroup
) -> _Send:
    def send(x_ND: Tensor) -> tuple[Tensor, Waitable]:
        rows = len(x_ND) if output_splits is None else sum(output_splits)
        out_RD = x_ND.new_empty(rows, *x_ND.shape[1:])
        return out_RD, exchange_rows(out_RD, x_ND, group, "ep", output_splits, input_splits)

    return send


def _gather(group: dist.ProcessGroup, of: Parallelism) -> _Send:
    def send(x_ND: Tensor) -> tuple[Tensor, Waitable]:
        out = x_ND.new_empty(group.size() * len(x_ND), *x_ND.shape[1:])
        return out, all_gather(out, x_ND, group, of)

    return send


def _sum_blocks(group: dist.ProcessGroup, of: Parallelism) -> _Send:
    def send(x_RD: Tensor) -> tuple[Tensor, Waitable]:
        out = x_RD.new_empty(len(x_RD) // group.size(), *x_RD.shape[1:])
        return out, reduce_scatter(out, x_RD, group, of)

    return send


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


def _start(x_ND: Tensor, there: _Send, back: _Send) -> Arriving:
    exchange = _Exchange(there, back)
    return Arriving(_Start.apply(x_ND, exchange), exchange)


def start_all_to_all(
    x_ND: Tensor,
    input_splits: list[int] | None,
    output_splits: list[int] | None,
    group: dist.ProcessGroup,
) -> Arriving:
    """:func:`all_to_all` without waiting; its gradient overlaps what the forward overlapped."""
    # The transpose of "send these rows there" is "send their gradients back".
    return _start(
        x_ND,
        _all_to_all(input_splits, output_splits, group),
        _all_to_all(output_splits, input_splits, group),
    )


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


def start_gather_rows(x_ND: Tensor, group: dist.ProcessGroup, of: Parallelism) -> Arriving:
    """[N, ...], N alike on all ranks -> [ranks · N, ...] on every one, in rank order, later.

    The gradient of a row is the sum of all ranks' gradients of it.
    """
    return _start(x_ND, _gather(group, of), _sum_blocks(group, of))


def start_scatter_sums(x_RD: Tensor, group: dist.ProcessGroup, of: Parallelism) -> Arriving:
    """[ranks · N, ...] -> [N, ...]: the r-th block, summed over ranks, on rank r, later."""
    return _start(x_RD, _sum_blocks(group, of), _gather(group, of))


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Each rank's r-th row to rank r: [ranks, ...] integers, by rank sent to -> by rank sent from.

    No gradient; every rank of ``group`` must call.
    """
    received, counts = torch.empty_like(counts), counts.contiguous()
    exchange_rows(received, counts, group, "ep").wait()
    return received


def all_gather_rows(
    row_V: Tensor, group: dist.ProcessGroup | None = None, of: Parallelism = "world"
) -> Tensor:
    """[V] on each rank of a group, or of all -> [ranks, V] on every one, in rank order."""
    ranks = dist.get_world_size(group)
    rows = row_V.new_empty(ranks * row_V.numel())
    all_gather(rows, row_V.contiguous(), group, of).wait()
    return rows.view(ranks, -1)


def exchange_rows(
    out: Tensor,
    x: Tensor,
    group: dist.ProcessGroup,
    of: Parallelism,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> Waitable:
    """Begin to send every rank its part of the first dim; equal ones where no splits are given."""

    def begin() -> Any:
        return dist.all_to_all_single(
            out, x, output_splits, input_splits, group=group, async_op=True
        )

    return watched(Kind("all_to_all", of), x, group, begin)


def all_reduce(
    x: Tensor, group: dist.ProcessGroup | None = None, of: Parallelism = "world"
) -> Waitable:
    """Begin to sum a tensor over ranks, in place."""
    return watched(
        Kind("all_reduce", of), x, group, lambda: dist.all_reduce(x, group=group, async_op=True)
    )


def all_gather(
    out: Tensor, x: Tensor, group: dist.ProcessGroup | None, of: Parallelism
) -> Waitable:
    """Begin to gather equal tensors, one after another in ``out``."""
    return watched(
        Kind("all_gather", of), x, group, lambda: _all_gather(out, x, group=group, async_op=True)
    )


def reduce_scatter(
    out: Tensor, x: Tensor, group: dist.ProcessGroup, of: Parallelism, op: Any = None
) -> Waitable:
    """Begin to sum a tensor over ranks; each gets its part of the first dim."""
    op = dist.ReduceOp.SUM if op is None else op

    def begin() -> Any:
        return _reduce_scatter(out, x, op=op, group=group, async_op=True)

    return watched(Kind("reduce_scatter", of), x, group, begin)


# torch 2.13 renamed the tensor forms of these and warns on the old names; 2.11 has only those.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
