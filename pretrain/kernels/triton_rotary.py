"""The kernel of :mod:`pretrain.kernels.rotary`: a program has a token, and some of its heads."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(
    x, cos, sin, out, S, H, of_batch, of_token, of_head, P: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, FROM_PAIRS: tl.constexpr, TO_PAIRS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """(a, b) -> (a cos - b sin, b cos + a sin), or with BACK by the opposite angle."""
    token = tl.program_id(0).to(tl.int64)
    position = token % S
    heads = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)[:, None]
    pairs = tl.arange(0, HALF)[None, :]
    c = tl.load(cos + position * (P // 2) + pairs, mask=pairs < P // 2, other=0.0)
    s = tl.load(sin + position * (P // 2) + pairs, mask=pairs < P // 2, other=0.0)
    if BACK:
        s = -s
    mask = (heads < H) & (pairs < P // 2)
    source = x + token // S * of_batch + position * of_token + heads * of_head
    source += pairs * 2 if FROM_PAIRS else pairs
    a = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + (1 if FROM_PAIRS else P // 2), mask=mask, other=0.0).to(tl.float32)
    target = out + (token * H + heads) * P + (pairs * 2 if TO_PAIRS else pairs)
    kind = out.dtype.element_ty
    tl.store(target, (a * c - b * s).to(kind), mask=mask)
    tl.store(target + (1 if TO_PAIRS else P // 2), (b * c + a * s).to(kind), mask=mask)
