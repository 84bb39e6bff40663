"""The kernels of :mod:`moe.kernels.rows`: a program has BLOCK columns of a row of the result."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_real(row, num_real, BLOCK: tl.constexpr):
    """[BLOCK] whether a row is before the end of the real rows. A block: numpy 2.4, in which
    Triton's interpreter computes, takes no mask that is a scalar."""
    rows = tl.full((BLOCK,), 0, tl.int64) + row
    return rows >= 0 if num_real is None else rows < tl.load(num_real)


@triton.jit
def take(x, source, num_real, out, D: tl.constexpr, BLOCK: tl.constexpr):
    """out[r] = x[source[r]], or zeros."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (columns < D) & is_real(row, num_real, BLOCK)
    values = tl.load(x + tl.load(source + row) * D + columns, mask=mask, other=0.0)
    tl.store(out + row * D + columns, values, mask=columns < D)


@triton.jit
def add_up(y, order, ends, num_real, out, R, D: tl.constexpr, BLOCK: tl.constexpr):
    """out[s] = the sum of y over order[ends[s] : ends[s + 1]], one after another; from R on there
    is no y."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.load(ends + row), tl.load(ends + row + 1)):
        source = tl.load(order + i)
        exists = tl.full((BLOCK,), 0, tl.int64) + source < R
        mask = (columns < D) & exists & is_real(source, num_real, BLOCK)
        total += tl.load(y + source * D + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * D + columns, total.to(out.dtype.element_ty), mask=columns < D)
