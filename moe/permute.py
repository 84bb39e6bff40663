"""Sorting tokens by expert within one rank, and the way back.

Legend: T tokens, K top_k, N = T·K routed rows, E experts, D d_model.

Autograd's own backward of ``x[index]`` is an accumulating scatter, which is slow and, on CUDA,
not deterministic. Both directions are gathers here: a permutation's transpose is its inverse.
"""

from __future__ import annotations

from typing import Any

import torch
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
        grad = _spread(grads[0], order_N, inverse_N)
        return grad.unflatten(0, (len(inverse_N) // ctx.top_k, ctx.top_k)).sum(1), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y_ND: Tensor, weights_TK: Tensor, order_N: Tensor, inverse_N: Tensor
    ) -> Tensor:
        T, K = weights_TK.shape
        ctx.save_for_backward(y_ND, weights_TK, order_N, inverse_N)
        y_TKD = _spread(y_ND, order_N, inverse_N).view(T, K, y_ND.shape[-1])
        return torch.bmm(weights_TK.to(y_ND.dtype).unsqueeze(1), y_TKD).squeeze(1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        (grad_TD,) = grads
        y_ND, weights_TK, order_N, inverse_N = ctx.saved_tensors
        T, K = weights_TK.shape
        # In sorted order both products read and write their rows in one pass.
        grad_ND = grad_TD.index_select(0, order_N // K)
        dots_N = (y_ND.float() * grad_ND.float()).sum(-1)
        grad_weights_TK = _spread(dots_N, order_N, inverse_N).view(T, K).to(weights_TK.dtype)
        weights_N1 = weights_TK.flatten().index_select(0, order_N).unsqueeze(1)
        return grad_ND * weights_N1.to(grad_ND.dtype), grad_weights_TK, None, None


def _spread(rows: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Sorted rows back at their assignments, T·K of them; zeros at those that were dropped."""
    if len(order_N) == len(inverse_N):
        return rows.index_select(0, inverse_N)
    return rows.new_zeros(len(inverse_N), *rows.shape[1:]).index_copy_(0, order_N, rows)


def permute(x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, top_k: int) -> Tensor:
    """Copy each token once per assignment, sorted by expert: [T, D] -> [N, D].

    ``order_N`` may be cut to the assignments that were not dropped; N is then fewer than T·K.
    """
    out: Tensor = _Permute.apply(x_TD, order_N, inverse_N, top_k)
    return out


def unpermute(y_ND: Tensor, weights_TK: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
    """Weigh and sum each token's rows: [N, D], [T, K] -> [T, D].

    The gradient with respect to the weights is accumulated in float32.
    """
    out: Tensor = _Unpermute.apply(y_ND, weights_TK, order_N, inverse_N)
    return out


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, order_R: Tensor) -> Tensor:
        ctx.save_for_backward(order_R)
        return x_RD.index_select(0, order_R)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        (grad_RD,) = grads
        (order_R,) = ctx.saved_tensors
        out_RD = torch.empty_like(grad_RD)
        return out_RD.index_copy_(0, order_R, grad_RD), None


def reorder(x_RD: Tensor, order_R: Tensor) -> Tensor:
    """``x_RD[order_R]`` for an ``order_R`` that is a permutation."""
    out: Tensor = _Reorder.apply(x_RD, order_R)
    return out
