"""One object: a zarr v3 ``sharding_indexed`` shard of chunks, each with its CRC32C.

The bytes are as zarr's sharding codec document (version 1.0) has them: chunks in any order, each
followed by its CRC32C; then the index, an offset and a length for every chunk in row-major order
(both 2**64 - 1 where there is none), little-endian uint64, followed by the index's CRC32C. Chunks
that are not compressed begin at multiples of a page, where they are large, or of 8 bytes; objects
of large ones are whole pages. Between chunks, and before such an index, are zeros, which the index
does not know.
They are written here rather than through zarr-python, whose writer copies the object repeatedly,
and read here because zarr-python takes a missing object for zeros. Its reader and tensorstore's
read what this writes; tests hold them to it.
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

assert sys.byteorder == "little", "objects are written from memory as it is"
_LARGE_CHUNK = 1 << 20

Array: TypeAlias = "NDArray[Any]"
ReadInto = Callable[[Box, Array], None]
"""Fills an array, in the stored dtype, with the numbers of a box."""


@dataclass(frozen=True)
class ObjectLayout:
    """What is where in one object."""

    record: ArrayRecord
    coordinates: tuple[int, ...]

    @property
    def key(self) -> str:
        """Its key below a save id."""
        return object_key(self.record.name, self.coordinates)

    @cached_property
    def box(self) -> Box:
        """The part of the array in it."""
        return cell_box(self.coordinates, self.record.shard_shape, self.record.shape)

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """How many chunks it has along each dim, those beyond the array's edge among them."""
        sizes = zip(self.record.shard_shape, self.record.chunk_shape, strict=True)
        return tuple(shard // chunk for shard, chunk in sizes)

    @cached_property
    def chunks(self) -> list[tuple[int, Box]]:
        """The number and the box of every chunk that touches the array."""
        record = self.record
        dims = zip(self.coordinates, self.grid, record.shard_shape, record.chunk_shape,
                   record.shape, strict=True)  # fmt: skip
        # Along each dim the chunk's place in the grid, and what of the array is in it.
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
    def stride(self) -> int:
        """From one chunk that is not compressed to the next."""
        return round_up(self.chunk_bytes + 4, PAGE if self._large else 8)

    @property
    def room(self) -> int:
        """Bytes to stage it in: a stride for each chunk."""
        return self.stride * len(self.chunks)

    @cached_property
    def length(self) -> int:
        """Its bytes, where its chunks are not compressed."""
        end = self.room - self.stride + self.chunk_bytes + 4 + self.index_bytes
        return round_up(end, PAGE) if self._large else end

    @property
    def page_room(self) -> int:
        """Bytes to stage all of it in, so that the next one begins at a page."""
        return round_up(max(self.room, self.length), PAGE)

    @property
    def index_bytes(self) -> int:
        """The bytes of the index at its end."""
        return math.prod(self.grid) * 16 + 4

    @property
    def _large(self) -> bool:
        return self.chunk_bytes >= _LARGE_CHUNK

    def fill(self, box: Box, room: Bytes, read: ReadInto) -> None:
        """Lay the numbers of one chunk's box into the ``stride`` bytes of ``room``."""
        shape = self.record.chunk_shape
        values = room[: self.chunk_bytes].view(self.record.dtype).reshape(shape)
        sizes = box_shape(box)
        if sizes != shape:
            values[...] = 0
        corner: tuple[Any, ...] = (*(slice(0, size) for size in sizes), ...)
        read(box, values[corner])  # an array, of a scalar too


def round_up(count: int, step: int) -> int:
    """The smallest multiple of ``step`` that is at least ``count``."""
    return -(-count // step) * step
