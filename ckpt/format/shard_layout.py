"""One object: a zarr v3 ``sharding_indexed`` shard of chunks, each with its CRC32C.

The bytes are as zarr's sharding codec document (version 1.0) has them: chunks in any order, each
followed by its CRC32C; then the index, an offset and a length for every chunk in row-major order
(both 2**64 - 1 for an empty chunk), little-endian uint64, followed by the index's CRC32C. An
uncompressed chunk begins at a multiple of a page where chunks are large, else of 8 bytes; an object
of large chunks is a number of entire pages. The gaps between chunks, and before the index, are
zeros.

Objects are not written through zarr-python, whose writer copies each object several times, and not
read through zarr-python, which reads a missing object as zeros. zarr-python and tensorstore can
read the objects, which tests check.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, TypeAlias

from numpy.typing import NDArray

from ckpt.format.array import ArrayRecord
from ckpt.format.object_index import object_key
from ckpt.store import PAGE, Bytes
from parallel.layout import Box, box_shape, cell_box

assert sys.byteorder == "little", "objects are written without a change of byte order"
_LARGE_CHUNK = 1 << 20

Array: TypeAlias = "NDArray[Any]"
ReadInto = Callable[[Box, Array], None]
"""Fills an array, in the stored dtype, with the numbers of a box."""


@dataclass(frozen=True)
class ObjectLayout:
    """Where the chunks and the index of one object are."""

    record: ArrayRecord
    coordinates: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its key below a save id."""
        return object_key(self.record, self.coordinates)

    @cached_property
    def box(self) -> Box:
        """The part of the array in this object."""
        return cell_box(self.coordinates, self.record.shard_shape, self.record.shape)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """The number of chunks along each dim, chunks beyond the array's edge included."""
        sizes = zip(self.record.shard_shape, self.record.chunk_shape, strict=True)
        return tuple(shard // chunk for shard, chunk in sizes)

    @cached_property
    def chunks(self) -> list[tuple[int, Box]]:
        """The number and the box of every chunk that touches the array."""
        record = self.record
        dims = zip(self.coordinates, self.grid, record.shard_shape, record.chunk_shape,
                   record.shape, strict=True)  # fmt: skip
        # Along each dim: the chunk's index in the grid, and the chunk's extent in the array.
        along = [
            [(i, (at, min(at + chunk, size))) for i in range(count)
             if (at := shard_number * shard + i * chunk) < size]
            for shard_number, count, shard, chunk, size in dims
        ]  # fmt: skip
        strides = [math.prod(self.grid[dim + 1 :]) for dim in range(len(self.grid))]
        return [
            (
                sum(stride * place for stride, (place, _) in zip(strides, each, strict=True)),
                tuple(span for _, span in each),
            )
            for each in product(*along)
        ]

    @cached_property
    def chunk_bytes(self) -> int:
        """The bytes of one chunk before compression."""
        return math.prod(self.record.chunk_shape) * self.record.dtype.itemsize

    @cached_property
    def chunk_stride(self) -> int:
        """Bytes from the start of an uncompressed chunk to the start of the next one."""
        return round_up(self.chunk_bytes + 4, PAGE if self._large else 8)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of a buffer for all chunks, ``chunk_stride`` each."""
        return self.chunk_stride * len(self.chunks)

    @cached_property
    def length(self) -> int:
        """Bytes of the object without compression."""
        end = self.buffer_bytes - self.chunk_stride + self.chunk_bytes + 4 + self.index_bytes
        return round_up(end, PAGE) if self._large else end

    @property
    def padded_bytes(self) -> int:
        """Bytes of a buffer for the entire object, rounded up to a page."""
        return round_up(max(self.buffer_bytes, self.length), PAGE)

    @property
    def index_bytes(self) -> int:
        """Bytes of the index at the end of the object."""
        return math.prod(self.grid) * 16 + 4

    @property
    def _large(self) -> bool:
        return self.chunk_bytes >= _LARGE_CHUNK

    def fill(self, box: Box, buffer: Bytes, read: ReadInto) -> None:
        """Read the numbers of one chunk's box into the first bytes of ``buffer``."""
        shape = self.record.chunk_shape
        values = buffer[: self.chunk_bytes].view(self.record.dtype).reshape(shape)
        sizes = box_shape(box)
        if sizes != shape:
            values[...] = 0
        corner: tuple[Any, ...] = (*(slice(0, size) for size in sizes), ...)
        read(box, values[corner])  # the ellipsis keeps a scalar an array


def round_up(count: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``count``."""
    return -(-count // step) * step
