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

import contextlib
import math
import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, Protocol, TypeAlias

import numpy as np
from crc32c import crc32c
from numcodecs import zstd
from numpy.typing import NDArray

from ckpt.files import PAGE
from ckpt.format import ZSTD_LEVEL, ArrayRecord, CheckpointError
from ckpt.objects import ObjectRecord, object_key
from ckpt.store import Bytes, Reader
from parallel.layout import Box, cell_box, intersect

assert sys.byteorder == "little", "objects are written from memory as it is"

_NO_CHUNK = np.uint64(2**64 - 1)
_LARGE_CHUNK = 1 << 20
_HUGE_PAGE = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_READ_BYTES = 1 << 20  # at a time: what was read is still in the cache when it is summed
_MOST_PARTS = 512  # of one read; systems allow 1,024

Array: TypeAlias = "NDArray[Any]"
ReadInto = Callable[[Box, Array], None]
"""Fills an array, in the stored dtype, with the numbers of a box."""


class Target(Protocol):
    """Where numbers that are read go."""

    def memory(self, box: Box) -> list[Bytes] | None:
        """The bytes of a box in order, to be read into; None where they are not in one piece."""

    def write(self, box: Box, values: Array) -> None:
        """Take the numbers of a box, in the stored dtype."""


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
        return _round_up(self.chunk_bytes + 4, PAGE if self._large else 8)

    @property
    def room(self) -> int:
        """Bytes to stage it in: a stride for each chunk."""
        return self.stride * len(self.chunks)

    @cached_property
    def length(self) -> int:
        """Its bytes, where its chunks are not compressed."""
        end = self.room - self.stride + self.chunk_bytes + 4 + self.index_bytes
        return _round_up(end, PAGE) if self._large else end

    @property
    def page_room(self) -> int:
        """Bytes to stage all of it in, so that the next one begins at a page."""
        return _round_up(max(self.room, self.length), PAGE)

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
        sizes = tuple(stop - start for start, stop in box)
        if sizes != shape:
            values[...] = 0
        corner: tuple[Any, ...] = (*(slice(0, size) for size in sizes), ...)
        read(box, values[corner])  # an array, of a scalar too


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step


def aligned(count: int) -> Bytes:
    """Zeroed memory that direct writes take; much of it in huge pages where the system has them,
    which spares the device a list of small ones."""
    if count < _HUGE_PAGE:
        memory = np.zeros(count + PAGE, np.uint8)
        start = -memory.__array_interface__["data"][0] % PAGE
        return memory[start : start + count]
    mapping = mmap.mmap(-1, _round_up(count, _HUGE_PAGE) + _HUGE_PAGE, flags=_PRIVATE)
    with contextlib.suppress(AttributeError, OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.__array_interface__["data"][0] % _HUGE_PAGE
    return memory[start : start + count]


@dataclass
class Encoder:
    """The bytes of one object, in parts, and what a manifest says of it."""

    layout: ObjectLayout
    _checks: bytearray = field(default_factory=bytearray)
    _length: int = 0

    def parts(self, rooms: Iterable[Bytes]) -> Iterator[memoryview | bytes]:
        """Put checksums to the filled ``rooms``, each of some chunks, a stride for each; ends with
        the index, which is put into the last room where that has room for it.

        A part may be changed as soon as the next one is asked for.
        """
        layout, stride = self.layout, self.layout.stride
        index = np.full((math.prod(layout.grid), 2), _NO_CHUNK, dtype="<u8")
        left = [number for number, _ in layout.chunks]
        size = layout.chunk_bytes
        for room in rooms:
            here = left[: max(1, room.nbytes // stride)]
            left = left[len(here) :]
            for at, number in enumerate(here):
                chunk = room[at * stride : at * stride + size + 4].data
                if layout.record.compression == "zstd":
                    yield self._packed(chunk[:size], index[number])
                    continue
                self._seal(chunk, index[number], at * stride)
            if layout.record.compression == "zstd":
                continue
            used = len(here) * stride if left else (len(here) - 1) * stride + size + 4
            if not left and room.nbytes >= layout.length - self._length:
                used = layout.length - self._length
                room[used - layout.index_bytes : used] = np.frombuffer(_tail(index), np.uint8)
            self._length += used
            yield room[:used].data
        assert not left, f"{layout.key} lacks chunks"
        if layout.record.compression == "zstd" or self._length < layout.length:
            tail = _tail(index)
            if layout.record.compression == "none":
                tail = bytes(layout.length - self._length - len(tail)) + tail
            self._length += len(tail)
            yield tail

    def _seal(self, chunk: memoryview, entry: Array, offset: int) -> None:
        check = crc32c(chunk[:-4]).to_bytes(4, "little")
        chunk[-4:] = check
        self._checks += check
        entry[:] = self._length + offset, len(chunk)

    def _packed(self, chunk: memoryview, entry: Array) -> memoryview:
        packed = memoryview(bytearray(zstd.compress(chunk, ZSTD_LEVEL) + bytes(4)))
        self._seal(packed, entry, 0)
        self._length += len(packed)
        return packed

    def fill(self, read: ReadInto, memory: Bytes | None = None) -> Iterator[Bytes]:
        """Rooms for :meth:`parts`, one after the other in ``memory``, which is best aligned; in
        that of one chunk where there is none, or too little."""
        layout, stride = self.layout, self.layout.stride
        if memory is None or memory.nbytes < stride:
            memory = aligned(stride)
        # Writes of about the same length: a short one costs nearly as much as a long one.
        writes = -(-len(layout.chunks) // (memory.nbytes // stride))
        if max(layout.room, layout.length) <= memory.nbytes:
            writes = 1
        together = -(-len(layout.chunks) // writes)
        for first in range(0, len(layout.chunks), together):
            boxes = layout.chunks[first : first + together]
            last = first + together >= len(layout.chunks)
            room = memory[: len(boxes) * stride]
            if last and layout.length - first * stride <= memory.nbytes:
                room = memory[: max(room.nbytes, layout.length - first * stride)]
            for at, (_, box) in enumerate(boxes):
                chunk = room[at * stride : (at + 1) * stride]
                chunk[layout.chunk_bytes :] = 0  # it may have been another object's
                layout.fill(box, chunk, read)
            room[len(boxes) * stride :] = 0
            yield room

    @property
    def record(self) -> ObjectRecord:
        """Once all parts were taken."""
        return ObjectRecord(bytes=self._length, checksum=crc32c(bytes(self._checks)))


def _tail(index: Array) -> bytes:
    entries = index.tobytes()
    return entries + crc32c(entries).to_bytes(4, "little")


def read_object(
    reader: Reader, layout: ObjectLayout, expected: ObjectRecord, wanted: Box, target: Target
) -> int:
    """Read the part of one object that lies in ``wanted`` into ``target``; returns the count of
    numbers.

    Each chunk read must have its CRC32C, and those of all chunks together must be what the manifest
    says, so that no other object passes for this one. Until this returns, ``target`` may hold what
    is not so.

    Raises CheckpointError, without the object's name, where it is short, long or changed; OSError
    where it cannot be read.
    """
    if reader.size != expected.bytes:
        raise CheckpointError(f"has {reader.size} bytes, the manifest says {expected.bytes}")
    spans = _read_index(reader, layout)
    whole = intersect(layout.box, wanted) == layout.box
    near = {number: box if whole else intersect(box, wanted) for number, box in layout.chunks}
    reader.expect([(b - 4 if near[n] is None else a, b) for n, (a, b) in spans.items()])
    checks: dict[int, bytes] = {}
    count = 0
    room: Bytes | None = None
    for number, box in layout.chunks:
        start, stop = spans[number]
        common = near[number]
        check = np.empty(4, np.uint8)
        if common is None:
            reader.read_into(stop - 4, [check])
            checks[number] = check.tobytes()
            continue
        plain = layout.record.compression == "none"
        shape = tuple(e - s for s, e in box)
        direct = plain and common == box and shape == layout.record.chunk_shape
        parts = target.memory(box) if direct else None
        if parts is None:
            room = aligned(layout.chunk_bytes) if room is None and plain else room
            body = room if plain and room is not None else np.empty(stop - start - 4, np.uint8)
            parts = [body]
        _read_checked(reader, start, parts, check, number)
        checks[number] = check.tobytes()
        count += math.prod(e - s for s, e in common)
        if len(parts) == 1 and (not plain or parts[0] is room):
            values = _decode(parts[0], layout, number)
            place: tuple[Any, ...] = (*within(common, box), ...)  # an array, of a scalar too
            target.write(common, values[place])
    if crc32c(b"".join(checks.values())) != expected.checksum:
        raise CheckpointError("is damaged: it is not the one that was saved")
    return count


def _read_index(reader: Reader, layout: ObjectLayout) -> dict[int, tuple[int, int]]:
    """Where every chunk of the object begins and ends, its CRC32C included."""
    if reader.size < layout.index_bytes:
        raise CheckpointError("is damaged: it is shorter than its index")
    tail = np.empty(layout.index_bytes, np.uint8)
    reader.read_into(reader.size - tail.nbytes, [tail])
    _compare(crc32c(tail[:-4].data), tail[-4:], "its index")
    entries = tail[:-4].view("<u8").reshape(-1, 2).tolist()
    spans = {}
    for number, _ in layout.chunks:
        start, size = entries[number]
        exact = layout.record.compression != "none" or size == layout.chunk_bytes + 4
        if not (exact and size >= 4 and start + size <= reader.size):
            raise CheckpointError(f"is damaged: its index is wrong about chunk {number}")
        spans[number] = (start, start + size)
    return spans


def _read_checked(
    reader: Reader, start: int, parts: list[Bytes], check: Bytes, number: int
) -> None:
    found, left = 0, sum(part.nbytes for part in parts)
    for blocks in _blocks(parts):
        size = sum(block.nbytes for block in blocks)
        left -= size
        reader.read_into(start, blocks if left else [*blocks, check])
        for block in blocks:
            found = crc32c(block.data, found)
        start += size
    _compare(found, check, f"chunk {number}")


def _blocks(parts: list[Bytes]) -> Iterator[list[Bytes]]:
    """``parts`` in turn, some at a time, and large ones in pieces."""
    blocks: list[Bytes] = []
    size = 0
    for part in parts:
        for at in range(0, part.nbytes, _READ_BYTES):
            block = part[at : at + _READ_BYTES]
            if blocks and (size + block.nbytes > _READ_BYTES or len(blocks) == _MOST_PARTS):
                yield blocks
                blocks, size = [], 0
            blocks.append(block)
            size += block.nbytes
    yield blocks


def _decode(body: Bytes, layout: ObjectLayout, number: int) -> Array:
    if layout.record.compression == "zstd":
        try:
            # What is too short would be zeros at its end, without a word.
            if _unpacked_bytes(body[:18].tobytes()) != layout.chunk_bytes:
                raise ValueError
            body = zstd.decompress(body, np.empty(layout.chunk_bytes, np.uint8))
        except (RuntimeError, ValueError, MemoryError):
            raise CheckpointError(f"is damaged: chunk {number} is not what zstd made") from None
    return body.view(layout.record.dtype).reshape(layout.record.chunk_shape)


def _unpacked_bytes(head: bytes) -> int:
    """What a zstd frame says that it unpacks to, 0 where it does not say (RFC 8878, 3.1.1.1)."""
    descriptor = int.from_bytes(head[4:5], "little")
    single = descriptor >> 5 & 1
    width = (single, 2, 4, 8)[descriptor >> 6]
    start = 6 - single + (0, 1, 2, 4)[descriptor & 3]
    return int.from_bytes(head[start : start + width], "little") + (256 if width == 2 else 0)


def _compare(found: int, check: Bytes, what: str) -> None:
    if found != int.from_bytes(check.tobytes(), "little"):
        raise CheckpointError(f"is damaged: the CRC32C of {what} does not match")


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that pick ``box`` out of an array that holds ``outer``."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(box, outer, strict=True)
    )
