"""A stable sort of small whole numbers by counting, instead of a sort of 64-bit numbers.

Legend: N numbers, B bins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.kernels.operators import OPTIONS, operator

DIGIT_BITS = 10
MAX_BINS = 1 << 2 * DIGIT_BITS
"""The most bins; with more the caller sorts otherwise."""
PIECE = 128
"""Numbers of one program, which compares each with each."""


def _launch(bins_N: Tensor, num_bins: int, widths: list[int]) -> tuple[Tensor, Tensor]:
    """Sort by each digit, the lowest first; ``widths`` are the digits' bits."""
    from router.kernels import triton_sorting as kernels

    N, bins_N, one_digit = bins_N.numel(), bins_N.contiguous(), len(widths) == 1
    sizes = [1 << bits for bits in widths]
    # One fill for the counts of bins and for those of digits, which of one digit are the same.
    zeros = bins_N.new_zeros(num_bins + 1 + (0 if one_digit else sum(sizes)), dtype=torch.int64)
    counts_B1 = zeros[: num_bins + 1]
    digits = [counts_B1[1:]] if one_digit else list(zeros[num_bins + 1 :].split(sizes))
    pieces, first_bit, before_N = -(-N // PIECE), 0, None
    after_N = torch.empty(N, dtype=torch.int64, device=bins_N.device)
    if not N:
        return after_N, counts_B1
    for bits, size, totals in zip(widths, sizes, digits, strict=True):
        table = torch.empty(size, pieces, dtype=torch.int32, device=bins_N.device)
        after_N = torch.empty(N, dtype=torch.int64, device=bins_N.device)
        count_bins = not one_digit and before_N is None
        kernels.count_digits[(pieces,)](
            bins_N, before_N, table, totals, counts_B1, N, pieces,
            FIRST=first_bit, COUNT_BINS=count_bins, SIZE=size, PIECE=PIECE, num_warps=4, **OPTIONS,
        )  # fmt: skip
        # A program for each digit that there is: no number has a larger one.
        kernels.starts_of_digits[(len(totals),)](
            table, totals, pieces, None, SIZE=size, CHUNK=1024, num_warps=4, **OPTIONS
        )
        kernels.scatter_by_digit[(pieces,)](
            bins_N, before_N, table, after_N, N, pieces,
            FIRST=first_bit, SIZE=size, PIECE=PIECE, num_warps=8, **OPTIONS,
        )  # fmt: skip
        before_N, first_bit = after_N, first_bit + bits
    return after_N, counts_B1


def _launch_one_digit(bins_N: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    return _launch(bins_N, num_bins, [_bits(num_bins)])


def _launch_two_digits(bins_N: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    bits = _bits(num_bins)
    return _launch(bins_N, num_bins, [bits // 2, bits - bits // 2])


def _bits(num_bins: int) -> int:
    # The least histogram has two bins.
    return max((num_bins - 1).bit_length(), 1)


def _shapes(bins_N: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    counts_B1 = bins_N.new_empty(num_bins + 1, dtype=torch.int64)
    return bins_N.new_empty(bins_N.shape, dtype=torch.int64), counts_B1


_one_digit = operator(
    "sort_by_bin(Tensor bins, int num_bins) -> (Tensor, Tensor)",
    _launch_one_digit, _shapes, launches=4,
)  # fmt: skip
_two_digits = operator(
    "sort_by_many_bins(Tensor bins, int num_bins) -> (Tensor, Tensor)",
    _launch_two_digits, _shapes, launches=7,
)  # fmt: skip


def sort_by_bin(bins_N: Tensor, num_bins: int) -> tuple[Tensor, Tensor]:
    """Places ordered by bin and then by place, and the number of places of each bin.

    Args:
        bins_N: [N] int64, each in [0, B).
        num_bins: B, at most :data:`MAX_BINS`.

    Returns:
        [N] int64, as ``bins_N.argsort(stable=True)``; and [B + 1] int64: 0, then the counts.
    """
    sort = _one_digit if num_bins <= 1 << DIGIT_BITS else _two_digits
    order_N, counts_B1 = sort(bins_N, num_bins)
    return order_N, counts_B1
