"""The kernels of :mod:`moe.kernels.activation`: a program has a row, BLOCK columns at a time.

CURVE is 0 for SiLU, 1 for the exact GELU, 2 for ReLU²: moe.experts.activation has the sources.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe.kernels.triton_rows import is_real


@triton.jit
def _curve(z, CURVE: tl.constexpr):
    """act(z), act'(z)."""
    if CURVE == 0:
        sigmoid = 1 / (1 + tl.exp(-z))
        return z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
    if CURVE == 1:
        phi = 0.5 * (1 + tl.erf(z * 0.7071067811865476))  # 1 / sqrt(2)
        return z * phi, phi + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)  # 1 / sqrt(2 pi)
    # A NaN stays one.
    rectified = tl.where(z < 0, 0.0, z)
    return rectified * rectified, 2 * rectified


@triton.jit
def activate(
    gate, up, weights, num_real, h, CURVE: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr
):
    """h = weight · act(gate) · up, and zeros past the real rows."""
    row = tl.program_id(0).to(tl.int64)
    real = is_real(row, num_real, BLOCK)
    weight = tl.load(weights + row).to(tl.float32)
    for first in range(0, F, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        offsets = row * F + columns
        mask = (columns < F) & real
        u = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32)
        if gate is None:
            value, _ = _curve(u, CURVE)
        else:
            value, _ = _curve(tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32), CURVE)
            value *= u
        value = tl.where(real, value * weight, 0.0)
        tl.store(h + offsets, value.to(h.dtype.element_ty), mask=columns < F)


@triton.jit
def activate_backward(
    dh, gate, up, weights, num_real, dgate, dup, dweights, h,
    CURVE: tl.constexpr, F: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All gradients and h in one pass over memory."""
    row = tl.program_id(0).to(tl.int64)
    real = is_real(row, num_real, BLOCK)
    weight = tl.where(real, tl.load(weights + row).to(tl.float32), 0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, F, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        offsets = row * F + columns
        mask = (columns < F) & real
        u = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32)
        d = tl.load(dh + offsets, mask=mask, other=0.0).to(tl.float32)
        if gate is None:
            value, slope = _curve(u, CURVE)
            total += d * value
            d *= weight
            tl.store(dup + offsets, (d * slope).to(dup.dtype.element_ty), mask=columns < F)
        else:
            g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
            acted, slope = _curve(g, CURVE)
            value = acted * u
            total += d * value
            d *= weight
            tl.store(dup + offsets, (d * acted).to(dup.dtype.element_ty), mask=columns < F)
            tl.store(dgate + offsets, (d * u * slope).to(dgate.dtype.element_ty), mask=columns < F)
        tl.store(h + offsets, (value * weight).to(h.dtype.element_ty), mask=columns < F)
    tl.store(dweights + row, tl.sum(total, 0).to(dweights.dtype.element_ty))
