"""How an array is cut into objects and chunks."""

from __future__ import annotations

import math
from functools import lru_cache

from parallel.layout import ShardLayout

SHARD_BYTES = 64 << 20
"""The length that objects come near to: enough to stream, few enough to list."""
CHUNK_BYTES = 4 << 20
"""The length that inner chunks come near to: the least that a reader must read to verify."""


@lru_cache(maxsize=1 << 12)
def storage_grid(
    layout: ShardLayout,
    itemsize: int,
    shard_bytes: int = SHARD_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of an array's objects and of the chunks in them.

    No object crosses from one rank's slice into another's, so that each has one writer. Leading
    dims (layer, expert) are cut first, so that an object holds whole trailing ones.

    A dim that no slice's boundary cuts is cut anywhere: zarr lets the last object be short. In the
    others a size must divide the slice's; where none near the aim does (a prime number of rows),
    the slice stays whole in that dim and a later dim is cut.
    """
    grain = layout.grain()
    free = [g == max(n, 1) for g, n in zip(grain, layout.shape, strict=True)]
    shard = list(grain)
    for dim, size in enumerate(grain):
        wanted = _wanted(shard, dim, itemsize, shard_bytes)
        shard[dim] = _even_part(size, wanted) if free[dim] else _near_divisor(size, wanted)
    chunk = list(shard)
    for dim, size in enumerate(shard):
        wanted = _wanted(chunk, dim, itemsize, chunk_bytes)
        if free[dim]:
            # A last chunk beyond the array is padded: a divisor near the aim spares that.
            below = _divisor_below(size, wanted)
            chunk[dim] = below if below * 4 >= wanted else _even_part(size, wanted)
            shard[dim] = chunk[dim] * -(-size // chunk[dim])  # zarr wants chunks to divide it
        else:
            chunk[dim] = _near_divisor(size, wanted)
    return tuple(shard), tuple(chunk)


def _wanted(shape: list[int], dim: int, itemsize: int, target: int) -> int:
    rest = math.prod(shape) // shape[dim] * itemsize
    return max(1, min(shape[dim], target // max(rest, 1)))


def _even_part(size: int, at_most: int) -> int:
    return -(-size // -(-size // at_most))


def _divisor_below(size: int, wanted: int) -> int:
    return next(d for d in range(wanted, 0, -1) if size % d == 0)


def _near_divisor(size: int, wanted: int) -> int:
    """The divisor of ``size`` nearest to ``wanted``, at most; if too far below, the next above."""
    below = _divisor_below(size, wanted)
    if below * 4 >= wanted:
        return below
    return next(d for d in range(wanted, size + 1) if size % d == 0)
