"""One object: a zarr v3 ``sharding_indexed`` shard of uncompressed chunks, each with its CRC32C.

The bytes are as zarr's sharding codec document (version 1.0) has them: chunks in any order, each
followed by its CRC32C; then the index, an offset and a length for every chunk in row-major order
(both 2**64 - 1 where there is none), little-endian uint64, followed by the index's CRC32C.
They are written here rather than through zarr-python, whose writer copies the object repeatedly,
and read here because zarr-python takes a missing object for zeros. Its reader and tensorstore's
read what this writes; tests hold them to it.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ckpt.format import ArrayRecord, CheckpointError, ObjectRecord, crc32c
from parallel.layout import Box, cell_box, intersect

assert sys.byteorder == "little", "objects are written from memory as it is"

_NO_CHUNK = np.uint64(2**64 - 1)

ReadBox = Callable[[Box], "np.ndarray[Any, Any]"]


def _inner_grid(record: ArrayRecord) -> tuple[int, ...]:
    return tuple(s // c for s, c in zip(record.shard_shape, record.chunk_shape, strict=True))


def _inner_boxes(record: ArrayRecord, coordinates: tuple[int, ...]) -> Iterator[Box | None]:
    """The part of the array in each chunk of an object; None for one beyond the array's edge."""
    whole = tuple((0, size) for size in record.shape)
    origin = [i * s for i, s in zip(coordinates, record.shard_shape, strict=True)]
    for inner in product(*map(range, _inner_grid(record))):
        start = [o + i * c for o, i, c in zip(origin, inner, record.chunk_shape, strict=True)]
        box = tuple((s, s + c) for s, c in zip(start, record.chunk_shape, strict=True))
        yield intersect(box, whole)


def object_box(record: ArrayRecord, coordinates: tuple[int, ...]) -> Box:
    """The part of the array in one object."""
    return cell_box(coordinates, record.shard_shape, record.shape)


def write_object(
    path: Path, record: ArrayRecord, coordinates: tuple[int, ...], read_box: ReadBox
) -> ObjectRecord:
    """Write one object and make it durable. It must not exist.

    Args:
        path: the file; its folder must exist.
        record: the array.
        coordinates: which object of the array's grid.
        read_box: the numbers of any box inside the object, in the stored dtype.
    """
    index = np.full((math.prod(_inner_grid(record)), 2), _NO_CHUNK, dtype="<u8")
    checks = bytearray()
    with path.open("xb") as file:
        for i, box in enumerate(_inner_boxes(record, coordinates)):
            if box is None:
                continue
            data = _as_bytes(_pad(read_box(box), record.chunk_shape))
            index[i] = (file.tell(), data.nbytes + 4)
            checks += _write_checked(file, data)
        _write_checked(file, _as_bytes(index))
        length = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return ObjectRecord(bytes=length, checksum=crc32c(bytes(checks)))


def write_bytes(path: Path, data: bytes) -> ObjectRecord:
    """Write a small file and make it durable. It must not exist."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return ObjectRecord(bytes=len(data), checksum=crc32c(data))


def _write_checked(file: BinaryIO, data: np.ndarray[Any, Any]) -> bytes:
    """Write ``data`` and its CRC32C; returns the latter."""
    check = crc32c(data).to_bytes(4, "little")
    file.write(data.data)
    file.write(check)
    return check


def _as_bytes(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _pad(values: np.ndarray[Any, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if values.shape == shape:
        return values
    padded = np.zeros(shape, values.dtype)
    padded[tuple(slice(0, size) for size in values.shape)] = values
    return padded


def read_object(
    path: Path,
    record: ArrayRecord,
    coordinates: tuple[int, ...],
    expected: ObjectRecord,
    wanted: Box,
) -> Iterator[tuple[Box, np.ndarray[Any, Any]]]:
    """Read the parts of one object that lie in ``wanted``, verified before any is handed out.

    A wholly wanted object is read at once; of others only the chunks needed are read, and the
    CRC32C of the rest. Either way those of all chunks together must be what the manifest says, so
    that no other object passes for this one, and each chunk read must be what its own says.

    Yields pairs of a box in the array and its numbers in the stored dtype, read-only.
    Raises CheckpointError, naming the object, where it is missing, short, long or changed.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != expected.bytes:
                raise CheckpointError(
                    f"object {path} has {found} bytes, the manifest says {expected.bytes}"
                )
            whole = object_box(record, coordinates)
            all_of_it = intersect(wanted, whole) == whole
            read = _slicer(file.read()) if all_of_it else _ranged(file)
            yield from _chunks(path, record, coordinates, expected, wanted, read)
    except FileNotFoundError:
        raise CheckpointError(f"object {path} is missing, the manifest lists it") from None
    except OSError as error:
        raise CheckpointError(f"object {path} cannot be read: {error.strerror}") from None


def _slicer(data: bytes) -> Callable[[int, int], bytes]:
    return lambda start, stop: data[start:stop] if start >= 0 else data[start:]


def _ranged(file: BinaryIO) -> Callable[[int, int], bytes]:
    def read(start: int, stop: int) -> bytes:
        file.seek(start, os.SEEK_SET if start >= 0 else os.SEEK_END)
        return file.read(stop - start if start >= 0 else -start)

    return read


def _chunks(
    path: Path,
    record: ArrayRecord,
    coordinates: tuple[int, ...],
    expected: ObjectRecord,
    wanted: Box,
    read: Callable[[int, int], bytes],
) -> Iterator[tuple[Box, np.ndarray[Any, Any]]]:
    count = math.prod(_inner_grid(record))
    tail = read(-(count * 16 + 4), 0)
    _check(tail[:-4], tail[-4:], path, "its index")
    entries = np.frombuffer(tail[:-4], "<u8").reshape(count, 2)
    spans = {i: (int(s), int(s + n)) for i, (s, n) in enumerate(entries) if s != _NO_CHUNK}
    checks = {i: read(stop - 4, stop) for i, (_, stop) in spans.items()}
    if crc32c(b"".join(checks.values())) != expected.checksum:
        raise CheckpointError(f"object {path} is damaged: it is not the one that was saved")
    for i, box in enumerate(_inner_boxes(record, coordinates)):
        common = None if box is None else intersect(box, wanted)
        if box is None or common is None:
            continue
        if i not in spans:
            raise CheckpointError(f"object {path} lacks chunk {i}")
        body = read(spans[i][0], spans[i][1] - 4)
        _check(body, checks[i], path, f"chunk {i}")
        values = np.frombuffer(body, record.dtype).reshape(record.chunk_shape)
        yield common, values[within(common, box)]


def _check(body: bytes, check: bytes, path: Path, what: str) -> None:
    if crc32c(body) != int.from_bytes(check, "little"):
        raise CheckpointError(f"object {path} is damaged: the CRC32C of {what} does not match")


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The slices that pick ``box`` out of an array that holds ``outer``."""
    return tuple(
        slice(start - base, stop - base)
        for (start, stop), (base, _) in zip(box, outer, strict=True)
    )
