"""How an array is cut into objects and chunks."""

from __future__ import annotations

import math
from functools import lru_cache

from parallel.layout import ShardLayout
from parallel.placements import MeshLayout

SHARD_BYTES = 64 << 20
"""The length that objects aim at: long enough to stream, few enough to list."""
CHUNK_BYTES = 4 << 20
"""The length that chunks aim at: a reader must read whole chunks to verify them."""


@lru_cache(maxsize=1 << 12)
def storage_grid(
    layout: ShardLayout | MeshLayout,
    itemsize: int,
    shard_bytes: int = SHARD_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of an array's objects and of the chunks in each object.

    No object crosses the boundary between two ranks' slices: each object has one writer. Leading
    dims (layer, expert) are cut first; an object therefore holds entire trailing dims.

    A dim that is not sharded is cut at any size: zarr allows a short last object. In a sharded dim
    the object's size must divide the slice's size. Where no divisor is near the aim (a prime number
    of rows), the slice is not cut in that dim, and a later dim is cut.

    Args:
        layout: which rank holds which slice of the array.
        itemsize: bytes of one number.
        shard_bytes: the length that objects aim at.
        chunk_bytes: the length that chunks aim at.

    Returns:
        The shape of an object, and the shape of a chunk.
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
            # A chunk that reaches beyond the array is padded: prefer a divisor near the aim.
            below = _divisor_below(size, wanted)
            chunk[dim] = below if below * 4 >= wanted else _even_part(size, wanted)
            shard[dim] = chunk[dim] * -(
                -size // chunk[dim]
            )  # a multiple of the chunk, as zarr requires
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
    """The divisor of ``size`` next below ``wanted``; if under a quarter of it, the next above."""
    below = _divisor_below(size, wanted)
    if below * 4 >= wanted:
        return below
    return next(d for d in range(wanted, size + 1) if size % d == 0)
