"""How an array is cut into objects and chunks."""

from __future__ import annotations

import math

from parallel.layout import ShardLayout

SHARD_BYTES = 64 << 20
"""An object is at most about this long: enough to stream, few enough to list."""
CHUNK_BYTES = 4 << 20
"""An inner chunk is at most about this long: the least that a reader must read to verify."""


def storage_grid(
    layout: ShardLayout,
    itemsize: int,
    shard_bytes: int = SHARD_BYTES,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of an array's objects and of the chunks in them.

    No object crosses from one rank's slice into another's, so that each has one writer. Leading
    dims (layer, expert) are cut first, so that an object holds whole trailing ones.
    """
    grain = layout.grain()
    shard = list(grain)
    for dim, size in enumerate(grain):
        wanted = _wanted(shard, dim, itemsize, shard_bytes)
        # A dim that no boundary cuts may be cut anywhere: zarr allows a short last object.
        free = size == max(layout.shape[dim], 1)
        shard[dim] = -(-size // -(-size // wanted)) if free else _divisor(size, wanted)
    chunk = list(shard)
    for dim, size in enumerate(shard):
        # Within an object zarr wants chunks that divide it.
        chunk[dim] = _divisor(size, _wanted(chunk, dim, itemsize, chunk_bytes))
    return tuple(shard), tuple(chunk)


def _wanted(shape: list[int], dim: int, itemsize: int, target: int) -> int:
    rest = math.prod(shape) // shape[dim] * itemsize
    return max(1, min(shape[dim], target // max(rest, 1)))


def _divisor(size: int, at_most: int) -> int:
    return next(d for d in range(at_most, 0, -1) if size % d == 0)
