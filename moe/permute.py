"""Sorting tokens by expert within one rank, and the way back.

Legend: T tokens, K top_k, N = T·K routed rows, E experts, D d_model.

Autograd's own backward of ``x[index]`` is an accumulating scatter, which is slow and, on CUDA,
not deterministic. Both directions are gathers here: a permutation's transpose is its inverse.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def sort_by_expert(expert_indices_TK: Tensor) -> tuple[Tensor, Tensor]:
    """Order routed rows by expert, ties by token; what is dropped, beyond all experts, comes last.

    Args:
        expert_indices_TK: [T, K] int64.

    Returns:
        order_N: [N] int64; the n-th sorted row is the assignment order_N[n] of T·K.
        inverse_N: [N] int64; the assignment t·K + k is the sorted row inverse_N[t·K + k].
    """
    order_N = expert_indices_TK.flatten().argsort(stable=True)
    inverse_N = torch.empty_like(order_N)
    inverse_N[order_N] = torch.arange(order_N.numel(), device=order_N.device)
    return order_N, inverse_N


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_N, inverse_N)
        ctx.top_k = top_k
        return x_TD.index_select(0, order_N // top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        order_N, inverse_N = ctx.saved_tensors
        return _sum_per_token(grads[0], order_N, inverse_N, ctx.top_k), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_ND: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.top_k = top_k
        return _sum_per_token(y_ND, order_N, inverse_N, top_k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None]:
        (order_N,) = ctx.saved_tensors
        return grads[0].index_select(0, order_N // ctx.top_k), None, None, None


def _sum_per_token(rows_ND: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    """[N, D] sorted rows -> [T, D], each token's rows summed, in the order of k."""
    tokens = len(inverse_N) // top_k
    if len(order_N) < len(inverse_N):  # some were dropped, and count as zeros
        zeros = rows_ND.new_zeros(len(inverse_N), rows_ND.shape[1])
        spread_ND = zeros.index_copy_(0, order_N, rows_ND)
        return spread_ND.view(tokens, top_k, rows_ND.shape[1]).sum(1)
    if rows_ND.device.type == "cpu" and rows_ND.dtype == torch.float32 and tokens:
        # Gathers and sums in one pass over memory.
        sums_TD: Tensor = F.embedding_bag(inverse_N.view(tokens, top_k), rows_ND, mode="sum")
        return sums_TD
    return rows_ND.index_select(0, inverse_N).view(tokens, top_k, rows_ND.shape[1]).sum(1)


def permute(x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    """Copy each token once per assignment, sorted by expert: [T, D] -> [N, D].

    ``order_N`` may be cut to the assignments that were not dropped; N is then fewer than T·K.
    """
    out: Tensor = _Permute.apply(x_TD, order_N, inverse_N, top_k)
    return out


def unpermute(y_ND: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    """Sum each token's rows, which are weighted already: [N, D] -> [T, D]."""
    out: Tensor = _Unpermute.apply(y_ND, order_N, inverse_N, top_k)
    return out


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.rows = len(x)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad,) = grads
        (order,) = ctx.saved_tensors
        # Rows that were not taken have no gradient; where all were, nothing need be cleared.
        make = grad.new_empty if len(order) == ctx.rows else grad.new_zeros
        return make(ctx.rows, *grad.shape[1:]).index_copy_(0, order, grad), None


def reorder(x: Tensor, order: Tensor) -> Tensor:
    """``x[order]`` along the first dim, for an ``order`` that has no row twice."""
    out: Tensor = _Reorder.apply(x, order)
    return out
