"""Collectives with gradients, and the few plain ones that the rest of the house uses.

Legend: R rows received, N rows sent, D d_model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_ND: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.input_splits, ctx.output_splits, ctx.group = input_splits, output_splits, group
        out_RD = x_ND.new_empty(sum(output_splits), *x_ND.shape[1:])
        dist.all_to_all_single(out_RD, x_ND.contiguous(), output_splits, input_splits, group=group)
        return out_RD

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (grad_RD,) = grads
        # The transpose of "send these rows there" is "send their gradients back".
        grad_ND = grad_RD.new_empty(sum(ctx.input_splits), *grad_RD.shape[1:])
        dist.all_to_all_single(
            grad_ND, grad_RD.contiguous(), ctx.input_splits, ctx.output_splits, group=ctx.group
        )
        return grad_ND, None, None, None


def all_to_all(
    x_ND: Tensor, input_splits: list[int], output_splits: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Send ``input_splits[r]`` rows to each rank r, in order; receive ``output_splits[r]`` from it.

    Args:
        x_ND: [sum(input_splits), ...] rows, those for rank 0 first. Zero rows are ordinary.
        input_splits: rows for each rank of ``group``.
        output_splits: rows from each rank; it must be what that rank's input_splits say.
        group: the ranks that take part; every one must call.

    Returns:
        [sum(output_splits), ...] rows, those from rank 0 first. Differentiable: the backward
        sends each row's gradient to the row's origin.
    """
    out: Tensor = _AllToAll.apply(x_ND, input_splits, output_splits, group)
    return out


def exchange_counts(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Tell each rank how many rows it will get for each of its experts.

    Args:
        counts_E: [E] int64, rows that this rank has for every expert; E is a multiple of the
            group's size and rank r owns the r-th block.

    Returns:
        [ranks, E / ranks] int64: rows from each rank for each expert of this rank.
    """
    ranks = group.size()
    received = torch.empty_like(counts_E)
    dist.all_to_all_single(received, counts_E.contiguous(), group=group)
    return received.view(ranks, -1)


def all_gather_rows(row_V: Tensor) -> Tensor:
    """[V] on each rank of the default group -> [world, V] on every one, in rank order."""
    world = dist.get_world_size()
    rows = row_V.new_empty(world * row_V.numel())
    _all_gather(rows, row_V.contiguous())
    return rows.view(world, -1)


# torch 2.13 renamed the tensor form of all_gather and warns on the old name; 2.11 has only that.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
