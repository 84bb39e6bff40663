"""Operators that are one kernel on CUDA, and several in a torch that is built for a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_library = torch.library.Library("fake_gpu", "DEF")
_library.define("rms_norm(Tensor x, Tensor? w, int n) -> (Tensor, Tensor)")
_library.define(
    "rms_norm_backward(Tensor dy, Tensor x, Tensor scale, Tensor? w, int n) -> (Tensor, Tensor?)"
)
_aten = torch.library.Library("aten", "IMPL")


def _norm(x: Tensor, w: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((*x.shape[:-n], *[1] * n), dtype=torch.float32)
    return torch.empty_like(x), scale


def _norm_backward(
    dy: Tensor, x: Tensor, scale: Tensor, w: Tensor | None, n: int
) -> tuple[Tensor, Tensor | None]:
    return torch.empty_like(x), None if w is None else torch.empty_like(w)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, n: int) -> Tensor:
        y, scale = torch.ops.fake_gpu.rms_norm(x, w, n)
        ctx.save_for_backward(x, w, scale)
        ctx.n = n
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x, w, scale = ctx.saved_tensors
        backward = torch.ops.fake_gpu.rms_norm_backward
        return (*backward(grads[0].contiguous(), x, scale, w, ctx.n), None)


def install() -> None:
    """Use these operators as CUDA does, for the rest of the process."""
    for key in ("CUDA", "CPU", "Meta"):
        _library.impl("rms_norm", _norm, key)
        _library.impl("rms_norm_backward", _norm_backward, key)
    _aten.impl("silu_backward", lambda grad, z: torch.empty_like(z), "CUDA")
    _use_rms_norm()
    _use_attention()


def _use_rms_norm() -> None:
    plain = F.rms_norm

    def rms_norm(
        x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if weight is not None and weight.dtype != x.dtype:
            return plain(x, normalized_shape, weight, eps)  # CUDA fuses one dtype only
        out: Tensor = _RMSNorm.apply(x, weight, len(normalized_shape))
        return out

    F.rms_norm = rms_norm


def _use_attention() -> None:
    plain = F.scaled_dot_product_attention
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention

    def attention(
        q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Flash attention without a mask, and the memory-efficient kernel with one."""
        from torch.nn.attention.bias import CausalBias

        if isinstance(attn_mask, CausalBias):
            attn_mask, is_causal = None, True
        size, half = max(q.shape[-1], v.shape[-1]), q.dtype in (torch.bfloat16, torch.float16)
        if half and attn_mask is None and size <= 256 and q.numel():
            wide = -(-size // 8) * 8
            q, k, x = (F.pad(x, (0, n)) if (n := wide - x.shape[-1]) else x for x in (q, k, v))
            return flash(q, k, x, dropout_p, is_causal, scale=scale)[0][..., : v.shape[-1]]
        if enable_gqa and q.shape[1] != k.shape[1]:
            # The kernel takes as many heads of keys as of queries.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        if not q.numel() or (half and attn_mask is None):
            return plain(q, k, v, attn_mask, dropout_p, is_causal, scale=scale)
        bias = attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=q.dtype)
            bias = bias.masked_fill(attn_mask.logical_not(), -torch.inf)
        if bias is not None:
            bias = bias.expand(*q.shape[:3], k.shape[2])
        return efficient(q, k, v, bias, True, dropout_p, is_causal, scale=scale)[0]

    F.scaled_dot_product_attention = attention
