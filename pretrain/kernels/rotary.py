"""Rotary positions in one pass over memory.

Legend: B batch, S tokens of a sequence, H heads, P numbers of a head, half of them for each table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from router import kernels
from router.kernels import OPTIONS, operator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NUMBERS = 1024
"""Pairs of a program: eight for each thread of four warps."""


def has_kernel(x_BSHP: Tensor) -> bool:
    """Whether the kernel takes a tensor."""
    takes = x_BSHP.dim() == 4 and x_BSHP.dtype in DTYPES
    return takes and kernels.available(x_BSHP.device.type)


def _launch(
    x_BSHP: Tensor, cos_SP: Tensor, sin_SP: Tensor, from_pairs: bool, to_pairs: bool, back: bool
) -> Tensor:
    from pretrain.kernels import triton_rotary

    B, S, H, P = x_BSHP.shape
    assert cos_SP.shape == sin_SP.shape == (S, P // 2), "a turn for each position and pair"
    x_BSHP = x_BSHP if x_BSHP.stride(-1) == 1 else x_BSHP.contiguous()
    out_BSHP = x_BSHP.new_empty(B, S, H, P)
    if out_BSHP.numel():
        half = 1 << (P // 2 - 1).bit_length()
        heads = max(min(_NUMBERS // half, 1 << (H - 1).bit_length()), 1)
        triton_rotary.rotate[(B * S, -(-H // heads))](
            x_BSHP, cos_SP.contiguous(), sin_SP.contiguous(), out_BSHP, S, H, *x_BSHP.stride()[:3],
            P=P, HALF=half, HEADS=heads, FROM_PAIRS=from_pairs, TO_PAIRS=to_pairs, BACK=back,
            num_warps=4, **OPTIONS,
        )  # fmt: skip
    return out_BSHP


_rotate = operator(
    "rotate(Tensor x, Tensor cos, Tensor sin, bool from_pairs, bool to_pairs, bool back) -> Tensor",
    _launch, lambda x_BSHP, *_: x_BSHP.new_empty(x_BSHP.shape), launches=1,
)  # fmt: skip


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        x_BSHP: Tensor, cos_SP: Tensor, sin_SP: Tensor, from_pairs: bool, to_pairs: bool, back: bool
    ) -> Tensor:
        out_BSHP: Tensor = _rotate(x_BSHP, cos_SP, sin_SP, from_pairs, to_pairs, back)
        return out_BSHP

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[1:3])
        ctx.flags = inputs[3:]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        from_pairs, to_pairs, back = ctx.flags
        dx = _Rotate.apply(grads[0], *ctx.saved_tensors, to_pairs, from_pairs, not back)
        return dx, None, None, None, None, None


def rotate(x_BSHP: Tensor, cos_SP: Tensor, sin_SP: Tensor, interleaved: bool) -> Tensor:
    """[B, S, H, P] -> [B, S, H, P], contiguous: the pairs of each head, turned by the angles of the
    token's position; computed in float32 and rounded once, with the bits of plain operations.

    Args:
        x_BSHP: is copied first where the numbers of a head do not lie side by side.
        cos_SP: [S, P / 2] float32, as ``sin_SP``; they get no gradient.
        sin_SP: [S, P / 2].
        interleaved: pairs are (2i, 2i + 1), and not (i, i + P / 2). Those of the result never are.
    """
    out_BSHP: Tensor = _Rotate.apply(x_BSHP, cos_SP, sin_SP, interleaved, False, False)
    return out_BSHP
