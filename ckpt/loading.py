"""Reading a checkpoint: any slice of any array, verified, onto any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Manifest,
    ObjectRecord,
    metadata_objects,
    objects_dir,
    objects_key,
    read_manifest,
)
from ckpt.locations import Location, open_store
from ckpt.saving import THREADS, Progress
from ckpt.shard import Array, ObjectLayout, Target, read_object, within
from ckpt.store import Bytes, Store
from ckpt.tensors import LocalArray
from parallel.layout import Box, cells


class _Into:
    """A box of an array, in memory."""

    def __init__(self, box: Box, out: Array) -> None:
        self.box, self.out = box, out

    def memory(self, box: Box) -> list[Bytes] | None:
        place: tuple[Any, ...] = (*within(box, self.box), ...)  # an array, of a scalar too
        part = self.out[place]
        return [part.reshape(-1).view(np.uint8)] if part.flags.c_contiguous else None

    def write(self, box: Box, values: Array) -> None:
        self.out[within(box, self.box)] = values


class _Nowhere:
    """For those who only want to know whether it can be read."""

    def memory(self, box: Box) -> None:
        return None

    def write(self, box: Box, values: Array) -> None:
        pass


def read_box_into(
    root: Location, manifest: Manifest, record: ArrayRecord, box: Box, out: Array
) -> None:
    """Fill ``out``, in the stored dtype, with the numbers of a box. Every byte read is verified.

    Raises CheckpointError, naming the object, where one is missing, short or changed.
    """
    count = _read(open_store(root), manifest, record, box, _Into(box, out))
    assert count == out.size, f"{record.name} {box}: the chunks read do not cover it"


def read_box(root: Location, manifest: Manifest, record: ArrayRecord, box: Box) -> Array:
    """The same, into new memory."""
    out = np.empty([stop - start for start, stop in box], record.dtype)
    read_box_into(root, manifest, record, box, out)
    return out


def _read(store: Store, manifest: Manifest, record: ArrayRecord, box: Box, target: Target) -> int:
    count = 0
    for coordinates in cells(box, record.shard_shape):
        layout = ObjectLayout(record, coordinates)
        count += _read_one(store, manifest, layout, box, target)
    return count


def _read_one(
    store: Store, manifest: Manifest, layout: ObjectLayout, box: Box, target: Target
) -> int:
    key = f"{objects_key(manifest.save_id)}/{layout.key}"
    if layout.key not in manifest.objects:
        raise CheckpointError(f"object {store.where(key)} is on another node")
    try:
        with store.open(key) as reader:
            return read_object(reader, layout, manifest.objects[layout.key], box, target)
    except CheckpointError as error:
        raise CheckpointError(f"object {store.where(key)} {error}") from None
    except FileNotFoundError:
        raise _missing(store, key) from None
    except OSError as error:
        raise _unreadable(store, key, error) from None


def _missing(store: Store, key: str) -> CheckpointError:
    return CheckpointError(f"object {store.where(key)} is missing, the manifest lists it")


def _unreadable(store: Store, key: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"object {store.where(key)} cannot be read: {error.strerror}")


def load(root: Location, manifest: Manifest, arrays: Sequence[LocalArray]) -> None:
    """Fill this rank's slices in place, from objects of whatever layout they were saved under.

    Several objects are read at a time, straight into the tensors where those are in host memory.

    Raises:
        CheckpointError: where the checkpoint lacks an array, or has it in another shape or dtype,
            before anything is written; or where an object is missing, short or damaged, in which
            case the tensors are not to be used.
    """
    store = open_store(root)
    records = [_matching(manifest, array) for array in arrays]
    parts = [
        (array, box, ObjectLayout(record, coordinates))
        for array, record in zip(arrays, records, strict=True)
        for box in array.boxes
        for coordinates in cells(box, record.shard_shape)
    ]

    def read(part: tuple[LocalArray, Box, ObjectLayout]) -> int:
        array, box, layout = part
        return _read_one(store, manifest, layout, box, array)

    with ThreadPoolExecutor(THREADS) as pool:
        count = sum(pool.map(read, parts))
    boxes = [box for array in arrays for box in array.boxes]
    expected = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    assert count == expected, "the chunks read do not cover the arrays"


def _matching(manifest: Manifest, array: LocalArray) -> ArrayRecord:
    record, spec = manifest.array(array.spec.name), array.spec
    found = (record.shape, record.logical_dtype, record.attributes)
    wanted = (spec.shape, spec.logical_dtype, dict(spec.attributes))
    for what, a, b in zip(("shape", "dtype", "attributes"), found, wanted, strict=True):
        if a != b:
            raise CheckpointError(
                f"checkpoint array {spec.name} has {what} {a} but the model needs {b}"
            )
    return record


def verify(root: Location, manifest: Manifest, progress: Progress = lambda _: None) -> int:
    """Read every byte of a checkpoint and compare with its checksums; returns how many.

    Raises CheckpointError, naming the first object that is missing, short or damaged.
    """
    for problem in _problems(root, manifest, progress):
        raise CheckpointError(problem)
    return manifest.total_bytes


def find_damage(
    root: Location, manifest: Manifest, progress: Progress = lambda _: None
) -> list[str]:
    """Read every byte of a checkpoint; a line for each object that is missing, short or damaged."""
    return list(_problems(root, manifest, progress))


def _problems(root: Location, manifest: Manifest, progress: Progress) -> Iterator[str]:
    store = open_store(root)
    metadata = metadata_objects(manifest.arrays)
    layouts = {
        layout.key: layout
        for record in manifest.arrays
        for coordinates in manifest.coordinates(record)
        if (layout := ObjectLayout(record, coordinates)).key in manifest.objects
    }
    assert metadata.keys() | layouts.keys() == manifest.objects.keys(), "the manifest's coverage"

    def check(key: str) -> str | None:
        try:
            if key in metadata:
                _check_metadata(store, manifest, key, metadata[key])
            else:
                _read_one(store, manifest, layouts[key], layouts[key].box, _Nowhere())
        except CheckpointError as error:
            return str(error)
        finally:
            progress(manifest.objects[key].bytes)
        return None

    with ThreadPoolExecutor(THREADS) as pool:
        yield from filter(None, pool.map(check, [*metadata, *layouts]))


def _check_metadata(store: Store, manifest: Manifest, key: str, data: bytes) -> None:
    full = f"{objects_key(manifest.save_id)}/{key}"
    try:
        found = store.read(full)
    except FileNotFoundError:
        raise _missing(store, full) from None
    except OSError as error:
        raise _unreadable(store, full, error) from None
    if found != data or ObjectRecord.of(found) != manifest.objects[key]:
        raise CheckpointError(
            f"object {store.where(full)} is damaged: it is not what the manifest says"
        )


def _verify_metadata(store: Store, manifest: Manifest) -> None:
    for key, data in metadata_objects(manifest.arrays).items():
        _check_metadata(store, manifest, key, data)


def open_group(root: Path, step: int | None = None) -> zarr.Group:
    """The arrays of a checkpoint, read-only, through zarr-python.

    ``open_group(root)["model/layers/moe/experts/w_gate"][3, 17]`` is one expert. zarr-python takes
    a missing object for zeros, so every object's length is compared first, and what says how they
    are to be read.

    Raises CheckpointError where one is missing, short or long, or there is no checkpoint.
    """
    manifest = read_manifest(root, step)
    folder = objects_dir(root, manifest.save_id)
    _verify_metadata(open_store(root), manifest)
    for key, record in manifest.objects.items():
        path = folder / key
        if not path.exists():
            raise CheckpointError(f"object {path} is missing, the manifest lists it")
        if path.stat().st_size != record.bytes:
            raise CheckpointError(
                f"object {path} has {path.stat().st_size} bytes, the manifest says {record.bytes}"
            )
    return zarr.open_group(folder, mode="r", zarr_format=3)
