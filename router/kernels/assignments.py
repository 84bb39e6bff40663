"""Assignments of rows to experts, or to ranks, sorted both ways at once.

Legend: S rows, K top_k, N = S·K places, B bins.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from router.kernels.operators import OPTIONS, operator
from router.kernels.sorting import DIGIT_BITS, PIECE

MAX_BLOCKS = (1 << DIGIT_BITS) - 1
"""The most blocks: with the last bin they are one digit of the sort."""
MAX_COLUMNS = 32
"""The most columns K: a program compares a row's places with each other."""
_ELEMENTS = 1024


class SortedAssignments(NamedTuple):
    """Places, s·K + k of row s, ordered by bin and then by place. The last bin has those that are
    in no block."""

    order_N: Tensor
    """[N] int64: the places."""
    source_N: Tensor
    """[N] int64: their rows."""
    by_row_N: Tensor
    """[N] int64: for each row where its K places are in the order, the lowest first."""
    row_ends_S1: Tensor
    """[S + 1] int64: s·K."""
    counts_B1: Tensor
    """[B + 1] int64: 0, then the places of each bin."""
    bin_ends_B: Tensor
    """[B] int32: where each bin ends in the order."""


def _launch(
    experts_SK: Tensor, first_expert: int, block: int, num_blocks: int, once: bool
) -> tuple[Tensor, ...]:
    from router.kernels import triton_assignments as kernels
    from router.kernels.triton_sorting import starts_of_digits

    (S, K), bins, experts_SK = experts_SK.shape, num_blocks + 1, experts_SK.contiguous()
    N, size = S * K, 1 << num_blocks.bit_length()
    out = SortedAssignments(*_shapes(experts_SK, first_expert, block, num_blocks, once))
    out.counts_B1.zero_()
    if not N:
        out.row_ends_S1.zero_()
        out.bin_ends_B.zero_()
        return tuple(out)
    pieces = -(-N // PIECE)
    table = experts_SK.new_empty(size, pieces, dtype=torch.int32)
    bins_N, rank_of_N = (experts_SK.new_empty(N, dtype=torch.int32) for _ in range(2))
    totals = out.counts_B1[1:]
    kernels.count_bins[(pieces,)](
        experts_SK, bins_N, table, totals, N, pieces, first_expert, BLOCK=block, BINS=bins, K=K,
        ONCE=once, SIZE=size, PIECE=PIECE, num_warps=4, **OPTIONS,
    )  # fmt: skip
    starts_of_digits[(bins,)](
        table, totals, pieces, out.bin_ends_B, SIZE=size, CHUNK=1024, num_warps=4, **OPTIONS
    )
    kernels.scatter_by_bin[(pieces,)](
        bins_N, table, out.order_N, out.source_N, rank_of_N, N, pieces, K=K, PIECE=PIECE,
        num_warps=8, **OPTIONS,
    )  # fmt: skip
    slots = 1 << (K - 1).bit_length()
    rows = max(_ELEMENTS // slots, 1)
    kernels.sort_in_rows[(S // rows + 1,)](
        rank_of_N, out.by_row_N, out.row_ends_S1, S, K=K, ROWS=rows, SLOTS=slots, num_warps=4,
        **OPTIONS,
    )  # fmt: skip
    return tuple(out)


def _shapes(
    experts_SK: Tensor, first_expert: int, block: int, num_blocks: int, once: bool
) -> tuple[Tensor, ...]:
    S, K = experts_SK.shape
    new = experts_SK.new_empty
    places = new(S * K), new(S * K), new(S * K)
    return *places, new(S + 1), new(num_blocks + 2), new(num_blocks + 1, dtype=torch.int32)


_sort = operator(
    "sort_assignments(Tensor experts, int first_expert, int block, int num_blocks, bool once) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch, _shapes, launches=5,
)  # fmt: skip


def sort_assignments(
    experts_SK: Tensor, first_expert: int, block: int, num_blocks: int, once: bool = False
) -> SortedAssignments:
    """Sort the places of rows by the block of their experts.

    Args:
        experts_SK: [S, K] int64, K at most :data:`MAX_COLUMNS`; any numbers.
        first_expert: the first expert of the first block.
        block: the experts of a block.
        num_blocks: at most :data:`MAX_BLOCKS`; B is one more.
        once: a row is in a block once, at its first place there; its other places there are in the
            last bin.
    """
    return SortedAssignments._make(_sort(experts_SK, first_expert, block, num_blocks, once))
