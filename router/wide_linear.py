"""A product in a wider dtype than its inputs, which keeps the inputs for the backward as they are.

Autograd would keep the wide copy of the input: for the router of every MoE layer the hidden states
in float32, twice the bytes of the hidden states themselves.

Legend: T tokens, D d_model, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(x_TD: Tensor, w_ED: Tensor, dtype: torch.dtype) -> Tensor:
        return F.linear(x_TD.to(dtype), w_ED.to(dtype))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x_TD, w_ED, ctx.dtype = inputs
        ctx.save_for_backward(x_TD, w_ED)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_TD, w_ED = ctx.saved_tensors
        dx_TD = dw_ED = None
        if ctx.needs_input_grad[0]:
            dx_TD = (grads[0] @ w_ED.to(ctx.dtype)).to(x_TD.dtype)
        if ctx.needs_input_grad[1]:
            dw_ED = (grads[0].t() @ x_TD.to(ctx.dtype)).to(w_ED.dtype)
        return dx_TD, dw_ED, None


def wide_linear(x_TD: Tensor, w_ED: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, D], [E, D] -> [T, E] in ``dtype``, the products and sums as well; second derivatives
    exist."""
    if x_TD.dtype == w_ED.dtype == dtype:
        return F.linear(x_TD, w_ED)
    out: Tensor = _WideLinear.apply(x_TD, w_ED, dtype)
    return out


def keep_wide(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn``, for ``nn.Module._apply``, without its casts to less than float32."""

    def unless_narrower(tensor: Tensor) -> Tensor:
        out = fn(tensor)
        wide_enough = torch.promote_types(out.dtype, torch.float32) == out.dtype
        return out if wide_enough or out.dtype == tensor.dtype else tensor.to(out.device)

    return unless_narrower
