"""Rows along an index: copies of them, and their sums.

Legend: S rows, R places of an index into them, D their width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.kernels import OPTIONS, operator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of rows."""
LANE = 8
"""Numbers of a thread: 16 bytes of bfloat16, the widest access of memory."""


def columns_of(width: int) -> tuple[int, int]:
    """(columns of a program, its warps) for rows of a width.

    Of the widths at which each thread has :data:`LANE` columns, the widest at which no more is left
    idle than at narrower ones; rows below the narrowest have a power of two, and one warp.
    """
    narrowest = 32 * LANE
    if width <= narrowest:
        return 1 << (width - 1).bit_length(), 1
    best = min((narrowest << n for n in range(3)), key=lambda c: (-(-width // c) * c, -c))
    return best, best // narrowest


def _launch_take(x_SD: Tensor, source_R: Tensor, num_real: Tensor | None) -> Tensor:
    from moe.kernels import triton_rows as kernels

    (R,), D = source_R.shape, x_SD.shape[1]
    out_RD = x_SD.new_empty(R, D)
    if R and D:
        block, warps = columns_of(D)
        kernels.take[(R, -(-D // block))](
            x_SD.contiguous(), source_R.contiguous(), num_real, out_RD, D=D, BLOCK=block,
            num_warps=warps, **OPTIONS,
        )  # fmt: skip
    return out_RD


def _launch_sum(y_RD: Tensor, order_R: Tensor, ends_S1: Tensor, num_real: Tensor | None) -> Tensor:
    from moe.kernels import triton_rows as kernels

    S, D = ends_S1.shape[0] - 1, y_RD.shape[1]
    out_SD = y_RD.new_empty(S, D)
    if S and D:
        block, warps = columns_of(D)
        kernels.add_up[(S, -(-D // block))](
            y_RD.contiguous(), order_R.contiguous(), ends_S1.contiguous(), num_real, out_SD,
            len(y_RD), D=D, BLOCK=block, num_warps=warps, **OPTIONS,
        )  # fmt: skip
    return out_SD


_take = operator(
    "take_rows(Tensor x, Tensor source, Tensor? num_real) -> Tensor", _launch_take,
    lambda x_SD, source_R, _: x_SD.new_empty(source_R.shape[0], x_SD.shape[1]), launches=1,
)  # fmt: skip
_sum = operator(
    "sum_rows(Tensor y, Tensor order, Tensor ends, Tensor? num_real) -> Tensor", _launch_sum,
    lambda y_RD, _, ends_S1, __: y_RD.new_empty(ends_S1.shape[0] - 1, y_RD.shape[1]), launches=1,
)  # fmt: skip


def take_rows(x_SD: Tensor, source_R: Tensor, num_real: Tensor | None = None) -> Tensor:
    """``x[source]``: [S, D] -> [R, D], and zeros from row ``num_real`` on. No gradient.

    Args:
        x_SD: of one of :data:`DTYPES`.
        source_R: [R] int64, each in [0, S).
        num_real: a scalar of integers on the device; None for R.
    """
    out_RD: Tensor = _take(x_SD, source_R, num_real)
    return out_RD


def sum_rows(
    y_RD: Tensor, order_R: Tensor, ends_S1: Tensor, num_real: Tensor | None = None
) -> Tensor:
    """[R, D] -> [S, D]: row s sums the rows order[ends[s] : ends[s + 1]] of y. No gradient.

    A sum is made in float32, in the order's order, and rounded once: its bits depend on its terms
    alone. Rows from ``num_real`` on are skipped, and may be NaN; numbers from R on are skipped.
    """
    out_SD: Tensor = _sum(y_RD, order_R, ends_S1, num_real)
    return out_SD
