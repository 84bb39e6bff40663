"""The kernels of :mod:`router.kernels.sorting`; the only file there that imports Triton for them.

A digit of a number is its bits from FIRST on, SIZE - 1 at most. ``table`` is [SIZE, pieces] int32:
first how many numbers of a piece have a digit, and then where the first of them goes.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _digits(bins, before, places, mask, FIRST: tl.constexpr, SIZE: tl.constexpr):
    """The places in the order so far, and the digits of the numbers there."""
    sources = places.to(tl.int64)
    if before is not None:
        sources = tl.load(before + places, mask=mask, other=0)
    numbers = tl.load(bins + sources, mask=mask, other=0)
    return sources, numbers, ((numbers >> FIRST) & (SIZE - 1)).to(tl.int32)


@triton.jit
def count_digits(
    bins, before, table, totals, counts, N, pieces,
    FIRST: tl.constexpr, COUNT_BINS: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """The digits of a piece into ``table``, and added to the totals; sums of integers are exact."""
    piece = tl.program_id(0)
    places = piece * PIECE + tl.arange(0, PIECE)
    mask = places < N
    _, numbers, digits = _digits(bins, before, places, mask, FIRST, SIZE)
    amounts = tl.histogram(digits, SIZE, mask)
    sizes = tl.arange(0, SIZE)
    tl.store(table + sizes * pieces + piece, amounts)
    tl.atomic_add(totals + sizes, amounts.to(tl.int64), mask=amounts > 0)
    if COUNT_BINS:
        tl.atomic_add(counts + 1 + numbers, tl.full((PIECE,), 1, tl.int64), mask=mask)


@triton.jit
def starts_of_digits(table, totals, pieces, ends, SIZE: tl.constexpr, CHUNK: tl.constexpr):
    """Where the first number of each piece with one digit goes; a program has one digit. Into
    ``ends``, unless it is None, where the last one of all pieces ends."""
    digit = tl.program_id(0)
    sizes = tl.arange(0, SIZE)
    smaller = tl.load(totals + sizes, mask=sizes < digit, other=0)
    start = tl.sum(smaller, 0).to(tl.int32)
    for first in range(0, pieces, CHUNK):
        columns = first + tl.arange(0, CHUNK)
        amounts = tl.load(table + digit * pieces + columns, mask=columns < pieces, other=0)
        starts = start + tl.cumsum(amounts, 0) - amounts
        tl.store(table + digit * pieces + columns, starts, mask=columns < pieces)
        start += tl.sum(amounts, 0)
    if ends is not None:
        tl.store(ends + digit, start)


@triton.jit
def scatter_by_digit(
    bins, before, table, after, N, pieces,
    FIRST: tl.constexpr, SIZE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write each place of a piece behind those before it that have its digit."""
    piece = tl.program_id(0)
    lanes = tl.arange(0, PIECE)
    places = piece * PIECE + lanes
    mask = places < N
    sources, _, digits = _digits(bins, before, places, mask, FIRST, SIZE)
    # What is past the end comes last, and is before nothing.
    same = (digits[:, None] == digits[None, :]) & (lanes[None, :] < lanes[:, None])
    ranks = tl.sum(same.to(tl.int32), 1)
    starts = tl.load(table + digits * pieces + piece, mask=mask, other=0)
    tl.store(after + starts + ranks, sources, mask=mask)
