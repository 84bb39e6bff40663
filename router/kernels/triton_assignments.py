"""The kernels of :mod:`router.kernels.assignments`; ``starts_of_digits`` is that of the sort.

A place is one of S · K, row after row. Its bin is the block of its expert: first_expert + BLOCK · b
is the first expert of bin b. In the last bin are numbers outside of all blocks, and with ONCE those
of a block that the row has already.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def count_bins(
    experts, bins, table, totals, N, pieces, first_expert, BLOCK: tl.constexpr, BINS: tl.constexpr,
    K: tl.constexpr, ONCE: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The bins of a piece's places; and how many there are of each into ``table``, and added to the
    totals, as ``count_digits`` of the sort does."""
    piece = tl.program_id(0)
    places = piece * PIECE + tl.arange(0, PIECE)
    mask = places < N
    numbers = tl.load(experts + places, mask=mask, other=0) - first_expert
    inside = (numbers >= 0) & (numbers < BLOCK * (BINS - 1))
    own = tl.where(inside, numbers // BLOCK, BINS - 1)
    if ONCE:
        row = places // K * K
        again = places < 0
        for k in tl.static_range(K - 1):
            before = mask & (row + k < places)
            other = tl.load(experts + row + k, mask=before, other=0) - first_expert
            again = again | (before & (other >= 0) & (other // BLOCK == own))
        own = tl.where(again, BINS - 1, own)
    own = own.to(tl.int32)
    tl.store(bins + places, own, mask=mask)
    amounts = tl.histogram(own, SIZE, mask)
    sizes = tl.arange(0, SIZE)
    tl.store(table + sizes * pieces + piece, amounts)
    tl.atomic_add(totals + sizes, amounts.to(tl.int64), mask=amounts > 0)


@triton.jit
def scatter_by_bin(
    bins, table, order, sources, rank_of, N, pieces, K: tl.constexpr, PIECE: tl.constexpr
):
    """Each place, and its row, to where the order has it; and for each place where that is."""
    piece = tl.program_id(0)
    lanes = tl.arange(0, PIECE)
    places = piece * PIECE + lanes
    mask = places < N
    own = tl.load(bins + places, mask=mask, other=0)
    # What is past the end comes last, and is before nothing.
    same = (own[:, None] == own[None, :]) & (lanes[None, :] < lanes[:, None])
    starts = tl.load(table + own * pieces + piece, mask=mask, other=0)
    ranks = starts + tl.sum(same.to(tl.int32), 1)
    tl.store(order + ranks, places.to(tl.int64), mask=mask)
    tl.store(sources + ranks, (places // K).to(tl.int64), mask=mask)
    tl.store(rank_of + places, ranks, mask=mask)


@triton.jit
def sort_in_rows(
    rank_of, by_row, ends, S, K: tl.constexpr, ROWS: tl.constexpr, SLOTS: tl.constexpr
):
    """Each row's ranks in their order, and where the rows end: K places for each."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slots = tl.arange(0, SLOTS)[None, :]
    mask = (rows < S)[:, None] & (slots < K)
    own = tl.load(rank_of + rows[:, None] * K + slots, mask=mask, other=0)
    smaller = tl.zeros((ROWS, SLOTS), tl.int32)
    for k in tl.static_range(K):
        other = tl.load(rank_of + rows * K + k, mask=rows < S, other=0)
        smaller += (other[:, None] < own).to(tl.int32)
    tl.store(by_row + rows[:, None] * K + smaller, own.to(tl.int64), mask=mask)
    tl.store(ends + rows, rows.to(tl.int64) * K, mask=rows <= S)
