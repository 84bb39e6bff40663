"""Collectives of rows with gradients, and a few collectives without.

Legend: R rows received, N rows sent, D d_model, W numbers of a packed row, V of a row of counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.comm.comm_watch import CollectiveKind, CollectiveWork, Parallelism, monitored
from parallel.comm.host_buffers import new_empty
from parallel.crossing import group_of

_Send = Callable[[Tensor], tuple[Tensor, CollectiveWork]]
"""Starts a collective of the sent rows; returns the buffer for the received rows, and the work."""


class Wire(Protocol):
    """How rows are written for a transfer."""

    def pack(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, W], of any dtype."""
        ...

    def unpack(self, packed: Tensor, out_ND: Tensor) -> None:
        """Write [N, W] into [N, D]."""
        ...


class _Exchange:
    """A started collective in the forward, and in the backward the collective of its gradient,
    which travels as it is."""

    def __init__(self, there: _Send, back: _Send, wire: Wire | None = None) -> None:
        self.there, self.back, self.wire = there, back, wire
        self.packed: Tensor | None = None
        self.work: Any = None
        self.sent: Tensor | None = None
        self.grad_work: Any = None
        self.grad_ND: Tensor | None = None

    def start(self, x_ND: Tensor) -> Tensor:
        # The collective reads what is sent until it ends.
        self.sent = x_ND if self.wire is None else self.wire.pack(x_ND)
        out_RD, self.work = self.there(self.sent)
        if self.wire is None:
            return out_RD
        self.packed = out_RD
        return new_empty(x_ND, len(out_RD), *x_ND.shape[1:])

    def wait(self, out_RD: Tensor) -> None:
        self.work.wait()
        if self.wire is not None:
            assert self.packed is not None
            self.wire.unpack(self.packed, out_RD)
        # The work holds the received tensor, which holds the graph, which holds the work: a cycle
        # through C++ that no garbage collector frees.
        self.work = self.sent = self.packed = None

    def start_back(self, grad_RD: Tensor) -> None:
        self.grad_ND, self.grad_work = self.back(grad_RD)


def _all_to_all(
    input_splits: list[int] | None, output_splits: list[int] | None, group: dist.ProcessGroup
) -> _Send:
    def send(x_ND: Tensor) -> tuple[Tensor, CollectiveWork]:
        rows = len(x_ND) if output_splits is None else sum(output_splits)
        out_RD = new_empty(x_ND, rows, *x_ND.shape[1:])
        return out_RD, exchange_rows(out_RD, x_ND, group, "ep", output_splits, input_splits)

    return send


def _gather(group: dist.ProcessGroup, of: Parallelism) -> _Send:
    def send(x_ND: Tensor) -> tuple[Tensor, CollectiveWork]:
        out = new_empty(x_ND, group.size() * len(x_ND), *x_ND.shape[1:])
        return out, all_gather(out, x_ND, group, of)

    return send


def _sum_blocks(group: dist.ProcessGroup, of: Parallelism) -> _Send:
    def send(x_RD: Tensor) -> tuple[Tensor, CollectiveWork]:
        out = new_empty(x_RD, len(x_RD) // group.size(), *x_RD.shape[1:])
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
        # torch.utils.checkpoint begins a recomputation where a rank first looks at a saved tensor,
        # and ends it at the last one that the rank has saved. With one saved here, ranks begin and
        # end between equal collectives, whatever else they save for their own tokens.
        ctx.save_for_backward(out_RD.new_empty(0))
        exchange.wait(out_RD)
        return out_RD.view_as(out_RD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors
        # The wait of the forward is the start in the backward, and the start of the forward is the
        # wait: the gradient's collective overlaps the backward of what the forward overlapped.
        ctx.exchange.start_back(grads[0].contiguous())
        return grads[0], None


class PendingRows:
    """Received rows of a collective that may not have ended."""

    def __init__(self, out_RD: Tensor, exchange: _Exchange) -> None:
        self._out, self._exchange = out_RD, exchange

    def wait(self) -> Tensor:
        """Wait for the collective; [R, ...] the received rows. Call once."""
        out: Tensor = _Wait.apply(self._out, self._exchange)
        return out


def _start(x_ND: Tensor, there: _Send, back: _Send, wire: Wire | None = None) -> PendingRows:
    exchange = _Exchange(there, back, wire)
    return PendingRows(_Start.apply(x_ND, exchange), exchange)


def start_all_to_all(
    x_ND: Tensor,
    input_splits: list[int] | None,
    output_splits: list[int] | None,
    group: dist.ProcessGroup,
    wire: Wire | None = None,
) -> PendingRows:
    """Start to send ``input_splits[r]`` rows to each rank r, and to receive ``output_splits[r]``
    from it: [sum(input_splits), ...], those for rank 0 first -> [sum(output_splits), ...], those
    from rank 0 first. Zero rows are allowed.

    Differentiable once: the backward sends each row's gradient to the rank that sent the row. That
    collective overlaps the backward of what the forward computed between this call and
    :meth:`PendingRows.wait`.

    Args:
        x_ND: the rows.
        input_splits: number of rows for each rank of ``group``; None: the same number for each.
        output_splits: number of rows from each rank, as in that rank's ``input_splits``.
        group: the ranks; every rank of the group must call.
        wire: packs the rows for the transfer, and not their gradients.
    """
    # The gradient of a sent row is the gradient of the received row, sent back.
    return _start(
        x_ND,
        _all_to_all(input_splits, output_splits, group),
        _all_to_all(output_splits, input_splits, group),
        wire,
    )


def start_gather_rows(x_ND: Tensor, group: dist.ProcessGroup, of: Parallelism) -> PendingRows:
    """Start to gather [N, ...] of each rank, the same N, to [ranks · N, ...] in rank order.

    The gradient of a row is the sum of all ranks' gradients of the row.
    """
    return _start(x_ND, _gather(group, of), _sum_blocks(group, of))


def start_scatter_sums(x_RD: Tensor, group: dist.ProcessGroup, of: Parallelism) -> PendingRows:
    """Start to reduce [ranks · N, ...] to [N, ...]: rank r gets the sum over ranks of block r."""
    return _start(x_RD, _sum_blocks(group, of), _gather(group, of))


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send row r of each rank to rank r: [ranks, ...] integers -> [ranks, ...] by sending rank.

    Without a gradient; every rank of ``group`` must call.
    """
    received, counts = torch.empty_like(counts), counts.contiguous()
    exchange_rows(received, counts, group, "ep").wait()
    return received


def all_gather_rows(
    row_V: Tensor, group: dist.ProcessGroup | None = None, of: Parallelism = "world"
) -> Tensor:
    """Gather [V] of each rank of ``group``, or of all ranks, to [ranks, V] in rank order."""
    group = group_of(group)
    ranks = group.size()
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
) -> CollectiveWork:
    """Start an all-to-all of the first dim from ``x`` into ``out``; equal splits where None."""

    def begin() -> Any:
        return dist.all_to_all_single(
            out, x, output_splits, input_splits, group=group, async_op=True
        )

    return monitored(CollectiveKind("all_to_all", of), x, group, begin)


def all_reduce(
    x: Tensor, group: dist.ProcessGroup | None = None, of: Parallelism = "world"
) -> CollectiveWork:
    """Start to sum ``x`` in place over the ranks of ``group``, or over all ranks."""
    return monitored(
        CollectiveKind("all_reduce", of),
        x,
        group,
        lambda: dist.all_reduce(x, group=group_of(group), async_op=True),
    )


def all_gather(
    out: Tensor, x: Tensor, group: dist.ProcessGroup | None, of: Parallelism
) -> CollectiveWork:
    """Start to gather ``x`` of every rank into ``out``, in rank order along the first dim."""
    return monitored(
        CollectiveKind("all_gather", of),
        x,
        group,
        lambda: _all_gather(out, x, group=group_of(group), async_op=True),
    )


def reduce_scatter(
    out: Tensor, x: Tensor, group: dist.ProcessGroup, of: Parallelism, op: Any = None
) -> CollectiveWork:
    """Start to reduce ``x`` over ranks: rank r gets block r of the first dim in ``out``. ``op`` is
    a sum where None. On the host a sum adds the ranks' blocks up in rank order."""
    op = dist.ReduceOp.SUM if op is None else op

    def begin() -> Any:
        if x.device.type == "cpu" and op == dist.ReduceOp.SUM:
            return _SumOfBlocks(out, x, group)
        return _reduce_scatter(out, x, op=op, group=group, async_op=True)

    return monitored(CollectiveKind("reduce_scatter", of), x, group, begin)


class _SumOfBlocks:
    """A reduce-scatter of host tensors: an all-to-all, and a sum of what arrives.

    ProcessGroupGloo's reduce-scatter sums everything on every rank and takes a block of the sum:
    14 MB over two ranks took 15 ms, and take 6 ms here.
    """

    def __init__(self, out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
        self.out = out
        self.blocks: Any = new_empty(out, group.size(), *out.shape)
        self.work: Any = dist.all_to_all_single(
            self.blocks.view(-1), x.reshape(-1), group=group, async_op=True
        )

    def get_future(self) -> Any:
        """Of the exchange."""
        return self.work.get_future()

    def wait(self) -> None:
        """Wait for the exchange, and add up."""
        if self.work is None:
            return
        self.work.wait()
        if self.out.dtype.itemsize < 4 or len(self.blocks) == 1:
            torch.sum(self.blocks, 0, dtype=self.out.dtype, out=self.out)  # rounds once
        else:
            torch.add(self.blocks[0], self.blocks[1], out=self.out)
            for block in self.blocks[2:]:
                self.out.add_(block)
        self.work = self.blocks = None


# torch 2.13 renamed these two functions and warns about the old names; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
