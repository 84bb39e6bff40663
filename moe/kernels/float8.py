"""Rows in float8 with powers of two as scales, as :class:`moe.float8.Float8Rows` packs them.

Legend: N rows, D d_model, P pieces of 128 of D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.kernels import OPTIONS, operator

_TILE = 128


def _launch(x_ND: Tensor) -> Tensor:
    from moe.kernels import triton_float8 as kernels

    N, D = x_ND.shape
    packed = _shapes(x_ND)
    if N and D:
        pieces = -(-D // _TILE)
        # Eight pieces are 1,024 numbers: 16 bytes of float8 for each of 64 threads.
        tiles = min(8, 1 << (pieces - 1).bit_length())
        kernels.pack[(N, -(-pieces // tiles))](
            x_ND.contiguous(), packed, D=D, PIECES=pieces, TILES=tiles, TILE=_TILE,
            num_warps=max(tiles // 4, 1), **OPTIONS,
        )  # fmt: skip
    return packed


def _shapes(x_ND: Tensor) -> Tensor:
    N, D = x_ND.shape
    return x_ND.new_empty(N, D + -(-D // _TILE), dtype=torch.uint8)


_pack = operator("pack_rows(Tensor x) -> Tensor", _launch, _shapes, launches=1)


def pack_rows(x_ND: Tensor) -> Tensor:
    """[N, D] of bfloat16, float16 or float32 -> [N, D + P] bytes, in one launch. No gradient."""
    packed: Tensor = _pack(x_ND)
    return packed
