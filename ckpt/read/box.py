"""Reading a box (a rectangular slice) of one array."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.format import (
    Array,
    ArrayRecord,
    Destination,
    Manifest,
    ObjectLayout,
    ObjectRecord,
    PackPlace,
    StoredTensor,
    objects_key,
    read_object,
)
from ckpt.store import Bytes, Location, Store, open_store
from parallel.layout import Box, box_shape, cells, intersect, within


class _Into:
    """Reads into a numpy array that holds a box."""

    def __init__(self, box: Box, out: Array) -> None:
        self.box, self.out = box, out

    def memory(self, box: Box) -> list[Bytes] | None:
        place: tuple[Any, ...] = (
            *within(box, self.box),
            ...,
        )  # the ellipsis keeps a scalar an array
        part = self.out[place]
        return [part.reshape(-1).view(np.uint8)] if part.flags.c_contiguous else None

    def write(self, box: Box, values: Array) -> None:
        self.out[within(box, self.box)] = values


class Nowhere:
    """Drops the numbers: for reads that only verify."""

    def memory(self, box: Box) -> None:
        """There are no buffers to read into."""

    def write(self, box: Box, values: Array) -> None:
        """Drop the values: their checksums were verified."""


def read_box_into(
    root: Location, manifest: Manifest, record: ArrayRecord, box: Box, out: Array
) -> None:
    """Fill ``out``, of the stored dtype, with the numbers of a box. Every byte read is verified.

    Raises CheckpointError, naming the object, where one is missing, short or changed.
    """
    count = _read(open_store(root), manifest, record, box, _Into(box, out))
    assert count == out.size, f"{record.name} {box}: the chunks read do not cover it"


def read_box(root: Location, manifest: Manifest, record: ArrayRecord, box: Box) -> Array:
    """The numbers of a box, in the stored dtype. Every byte read is verified.

    Raises CheckpointError, naming the object, where one is missing, short or changed.
    """
    out = np.empty(box_shape(box), record.dtype)
    read_box_into(root, manifest, record, box, out)
    return out


class PackReader:
    """Reads runs of the rows of packs, and keeps the chunks that it read last: the tensors of one
    chunk are read one after the other."""

    def __init__(self, root: Location, manifest: Manifest) -> None:
        self.root, self.manifest = root, manifest
        self._kept: tuple[str, Box, Array] | None = None

    def __call__(self, pack: ArrayRecord, run: Box) -> Array:
        """The numbers of a run, [1, length]."""
        if self._kept is None or self._kept[0] != pack.name or intersect(run, self._kept[1]) != run:
            self._kept = None  # two runs are never in memory
            slot, (start, stop) = run
            size = pack.chunk_shape[1]
            chunks = (start // size * size, min(-(-stop // size) * size, pack.shape[1]))
            wide = (slot, chunks)
            self._kept = pack.name, wide, read_box(self.root, self.manifest, pack, wide)
        _, box, numbers = self._kept
        return numbers[within(run, box)]


def read_tensor(
    root: Location,
    manifest: Manifest,
    tensor: StoredTensor,
    box: Box,
    read_pack: PackReader | None = None,
) -> Array:
    """The numbers of a box of one of ``manifest.tensors``, as :func:`read_box`.

    With ``read_pack``, many tensors of one pack are read with few reads.
    """
    if not isinstance(tensor, PackPlace):
        return read_box(root, manifest, tensor, box)
    read_pack = PackReader(root, manifest) if read_pack is None else read_pack
    out = np.empty(box_shape(box), tensor.dtype)
    count = 0
    for slot in range(tensor.layout.num_slots):
        for at, held in tensor.boxes(slot):
            common = intersect(held, box)
            if common is None:
                continue
            shape = box_shape(held)
            run = ((slot, slot + 1), (at, at + math.prod(shape)))
            part = read_pack(tensor.pack, run).reshape(shape)
            out[within(common, box)] = part[within(common, held)]
            count += math.prod(box_shape(common))
    assert count == out.size, f"{tensor.name} {box}: the slots do not cover it"
    return out


def _read(
    store: Store, manifest: Manifest, record: ArrayRecord, box: Box, destination: Destination
) -> int:
    count = 0
    for coordinates in cells(box, record.shard_shape):
        layout = ObjectLayout(record, coordinates)
        count += read_one(store, manifest, layout, box, destination)
    return count


def read_nowhere(store: Store, save_id: str, layout: ObjectLayout, expected: ObjectRecord) -> None:
    """Read and verify an entire object.

    Raises CheckpointError, without the object's name, where the object differs from ``expected``,
    and OSError where the object cannot be read.
    """
    with store.open(f"{objects_key(save_id)}/{layout.key}") as reader:
        read_object(reader, layout, expected, layout.box, Nowhere())


def read_one(
    store: Store, manifest: Manifest, layout: ObjectLayout, box: Box, destination: Destination
) -> int:
    """Read the part of ``box`` that one object holds; returns the number of numbers read.

    Raises CheckpointError where the object is missing, unreadable or damaged.
    """
    key = f"{objects_key(manifest.save_id)}/{layout.key}"
    if layout.key not in manifest.objects:
        raise CheckpointError(f"object {store.where(key)} is on another node")
    try:
        with store.open(key) as reader:
            return read_object(reader, layout, manifest.objects[layout.key], box, destination)
    except (CheckpointError, OSError) as error:
        raise named(error, store, key) from None


def named(error: CheckpointError | OSError, store: Store, key: str) -> CheckpointError:
    """An error about an object that the manifest lists, with the object's name."""
    name = f"object {store.where(key)}"
    if isinstance(error, CheckpointError):
        return CheckpointError(f"{name} {error}")
    if isinstance(error, FileNotFoundError):
        return CheckpointError(f"{name} is missing, the manifest lists it")
    return CheckpointError(f"{name} cannot be read: {error.strerror}")
