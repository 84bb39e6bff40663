"""The kernel of :mod:`moe.kernels.float8`, in whole numbers: sm_80 has no float8."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _e4m3(x):
    """float32 -> the byte of float8_e4m3fn: to nearest, ties to even, at most 448, as
    torch/headeronly/util/Float8_e4m3fn.h of torch 2.13 has it."""
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Below 2^-6 a sum with 2^14 leaves the steps of 2^-9 in its last bits.
    low = bits.to(tl.float32, bitcast=True) + tl.full(x.shape, 16384.0, tl.float32)
    subnormal = low.to(tl.int32, bitcast=True) - (141 << 23)
    normal = (bits - (120 << 23) + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    byte = tl.where(bits < (121 << 23), subnormal, normal)
    byte = tl.where(bits >= (1087 << 20), 0x7E, tl.minimum(byte, 0x7E))
    byte = tl.where(bits > 0x7F800000, 0x7F, byte)
    return (byte | sign).to(tl.uint8)


@triton.jit
def pack(x, packed, D: tl.constexpr, PIECES: tl.constexpr, TILES: tl.constexpr, TILE: tl.constexpr):
    """TILES pieces of a row, and their exponents."""
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.program_id(1) * TILES + tl.arange(0, TILES)
    columns = pieces[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(x + row * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    # In the order of whole numbers a NaN is above infinity.
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    finite = most < 0x7F800000
    # The least e with most <= 448 · 2^e; 448 is 1.75 · 2^8.
    exponents = (most >> 23) - 135 + ((most & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponents = tl.minimum(tl.maximum(exponents, -100), 120)
    exponents = tl.where(finite, exponents, 0)
    scales = ((127 - exponents) << 23).to(tl.float32, bitcast=True)
    start = packed + row * (D + PIECES)
    tl.store(start + columns, _e4m3(values * scales[:, None]), mask=columns < D)
    stored = tl.where(finite, exponents + 127, 255).to(tl.uint8)
    tl.store(start + D + pieces, stored, mask=pieces < PIECES)
