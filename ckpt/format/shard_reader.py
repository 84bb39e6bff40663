"""Reading and checking the chunks of one shard object."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c
from numcodecs import zstd

from ckpt.errors import CheckpointError
from ckpt.format.object_index import ObjectRecord
from ckpt.format.shard_layout import Array, ObjectLayout
from ckpt.format.shard_writer import aligned
from ckpt.store import Bytes, Reader
from parallel.layout import Box, box_shape, intersect, within

_READ_BYTES = 1 << 20  # of one read: the data is still in the cache when its CRC is computed
_MOST_PARTS = 512  # buffers of one read; systems allow 1,024


class Destination(Protocol):
    """Takes the numbers that are read."""

    def memory(self, box: Box) -> list[Bytes] | None:
        """Buffers for the bytes of a box, in order, to read into; None where there are none."""

    def write(self, box: Box, values: Array) -> None:
        """Take the numbers of a box, in the stored dtype; called where :meth:`memory` gave None."""


def read_object(
    reader: Reader,
    layout: ObjectLayout,
    expected: ObjectRecord,
    wanted: Box,
    destination: Destination,
) -> int:
    """Read the part of one object that lies in ``wanted`` into ``destination``; returns the
    number of numbers read.

    The CRC32C of each chunk read is checked, and the CRC32C of all chunks' CRC32Cs against the
    manifest: another object is never accepted in place of this one. Until this function returns,
    ``destination`` may hold unverified numbers.

    Raises CheckpointError, without the object's name, where the object is short, long or changed,
    and OSError where the object cannot be read.
    """
    if reader.size != expected.bytes:
        raise CheckpointError(f"has {reader.size} bytes, the manifest says {expected.bytes}")
    spans = _read_index(reader, layout)
    whole = intersect(layout.box, wanted) == layout.box
    near = {number: box if whole else intersect(box, wanted) for number, box in layout.chunks}
    reader.expect([(b - 4 if near[n] is None else a, b) for n, (a, b) in spans.items()])
    checks: dict[int, bytes] = {}
    count = 0
    buffer: Bytes | None = None
    for number, box in layout.chunks:
        start, stop = spans[number]
        common = near[number]
        check = np.empty(4, np.uint8)
        if common is None:
            reader.read_into(stop - 4, [check])
            checks[number] = check.tobytes()
            continue
        plain = layout.record.compression == "none"
        shape = box_shape(box)
        direct = plain and common == box and shape == layout.record.chunk_shape
        parts = destination.memory(box) if direct else None
        if parts is None:
            buffer = aligned(layout.chunk_bytes) if buffer is None and plain else buffer
            body = buffer if plain and buffer is not None else np.empty(stop - start - 4, np.uint8)
            parts = [body]
        _read_checked(reader, start, parts, check, number)
        checks[number] = check.tobytes()
        count += math.prod(box_shape(common))
        if len(parts) == 1 and (not plain or parts[0] is buffer):
            values = _decode(parts[0], layout, number)
            place: tuple[Any, ...] = (*within(common, box), ...)  # an array, of a scalar too
            destination.write(common, values[place])
    if crc32c(b"".join(checks.values())) != expected.checksum:
        raise CheckpointError("is damaged: it is not the one that was saved")
    return count


def _read_index(reader: Reader, layout: ObjectLayout) -> dict[int, tuple[int, int]]:
    """The first byte of every chunk of the object, and the byte after its CRC32C."""
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
    """``parts`` in order, in groups of at most ``_READ_BYTES``; long parts are split."""
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
            # numcodecs would leave the rest of the output as it was, without an error.
            if _unpacked_bytes(body[:18].tobytes()) != layout.chunk_bytes:
                raise ValueError
            body = zstd.decompress(body, np.empty(layout.chunk_bytes, np.uint8))
        except (RuntimeError, ValueError, MemoryError):
            raise CheckpointError(f"is damaged: chunk {number} is not what zstd made") from None
    return body.view(layout.record.dtype).reshape(layout.record.chunk_shape)


def _unpacked_bytes(head: bytes) -> int:
    """The content size in a zstd frame's header, 0 where there is none (RFC 8878, 3.1.1.1).

    Parsed here because numcodecs has no call for it: its ``decompress`` allocates what a damaged or
    forged header asks for, or fills a given output only in part.
    """
    descriptor = int.from_bytes(head[4:5], "little")
    single = descriptor >> 5 & 1
    width = (single, 2, 4, 8)[descriptor >> 6]
    start = 6 - single + (0, 1, 2, 4)[descriptor & 3]
    return int.from_bytes(head[start : start + width], "little") + (256 if width == 2 else 0)


def _compare(found: int, check: Bytes, what: str) -> None:
    if found != int.from_bytes(check.tobytes(), "little"):
        raise CheckpointError(f"is damaged: the CRC32C of {what} does not match")
