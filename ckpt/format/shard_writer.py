"""Encoding of one object: chunks, checksums and the index."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from crc32c import crc32c
from numcodecs import zstd

from ckpt.format.array import ZSTD_LEVEL
from ckpt.format.object_index import ObjectRecord
from ckpt.format.shard_layout import Array, ObjectLayout, ReadInto, round_up
from ckpt.store import PAGE, Bytes

_NO_CHUNK = np.uint64(2**64 - 1)
_HUGE_PAGE = 2 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def aligned(count: int) -> Bytes:
    """Zeroed memory, aligned as direct writes need it.

    Long buffers lie in huge pages where the system has them: the device then gets a short list of
    large pages.
    """
    if count < _HUGE_PAGE:
        memory = np.zeros(count + PAGE, np.uint8)
        start = -memory.__array_interface__["data"][0] % PAGE
        return memory[start : start + count]
    mapping = mmap.mmap(-1, round_up(count, _HUGE_PAGE) + _HUGE_PAGE, flags=_PRIVATE)
    with contextlib.suppress(AttributeError, OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapping, np.uint8)
    start = -memory.__array_interface__["data"][0] % _HUGE_PAGE
    return memory[start : start + count]


@dataclass
class Encoder:
    """The bytes of one object, in parts, and its record in a manifest."""

    layout: ObjectLayout
    _checks: bytearray = field(default_factory=bytearray)
    _length: int = 0

    def parts(self, buffers: Iterable[Bytes]) -> Iterator[memoryview | bytes]:
        """Add checksums to filled ``buffers``, and yield the object's bytes in parts.

        Each buffer holds some chunks, ``chunk_stride`` bytes each. The index comes last, in the
        last buffer where it fits. A part is valid until the next one is requested.
        """
        layout, stride = self.layout, self.layout.chunk_stride
        index = np.full((math.prod(layout.grid), 2), _NO_CHUNK, dtype="<u8")
        left = [number for number, _ in layout.chunks]
        size = layout.chunk_bytes
        for buffer in buffers:
            here = left[: max(1, buffer.nbytes // stride)]
            left = left[len(here) :]
            for at, number in enumerate(here):
                chunk = buffer[at * stride : at * stride + size + 4].data
                if layout.record.compression == "zstd":
                    yield self._packed(chunk[:size], index[number])
                    continue
                self._seal(chunk, index[number], at * stride)
            if layout.record.compression == "zstd":
                continue
            used = len(here) * stride if left else (len(here) - 1) * stride + size + 4
            if not left and buffer.nbytes >= layout.length - self._length:
                used = layout.length - self._length
                buffer[used - layout.index_bytes : used] = np.frombuffer(_tail(index), np.uint8)
            self._length += used
            yield buffer[:used].data
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
        """Yield filled buffers for :meth:`parts`, one after the other in ``memory``.

        ``memory`` should be aligned; where it is None or too short for a chunk, the buffer of one
        chunk is allocated.
        """
        layout, stride = self.layout, self.layout.chunk_stride
        if memory is None or memory.nbytes < stride:
            memory = aligned(stride)
        # Writes of about equal length: a short write costs nearly as much as a long one.
        writes = -(-len(layout.chunks) // (memory.nbytes // stride))
        if max(layout.buffer_bytes, layout.length) <= memory.nbytes:
            writes = 1
        together = -(-len(layout.chunks) // writes)
        for first in range(0, len(layout.chunks), together):
            boxes = layout.chunks[first : first + together]
            last = first + together >= len(layout.chunks)
            buffer = memory[: len(boxes) * stride]
            if last and layout.length - first * stride <= memory.nbytes:
                buffer = memory[: max(buffer.nbytes, layout.length - first * stride)]
            for at, (_, box) in enumerate(boxes):
                chunk = buffer[at * stride : (at + 1) * stride]
                chunk[layout.chunk_bytes :] = 0  # the memory may hold another object's bytes
                layout.fill(box, chunk, read)
            buffer[len(boxes) * stride :] = 0
            yield buffer

    @property
    def record(self) -> ObjectRecord:
        """The object's record in a manifest; valid once all parts were taken."""
        return ObjectRecord(bytes=self._length, checksum=crc32c(bytes(self._checks)))


def _tail(index: Array) -> bytes:
    entries = index.tobytes()
    return entries + crc32c(entries).to_bytes(4, "little")
