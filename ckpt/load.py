"""Reading a checkpoint: any slice of any array, verified, onto any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Manifest,
    crc32c,
    metadata_objects,
    object_key,
    objects_dir,
    read_manifest,
)
from ckpt.shard import read_object, within
from parallel.layout import Box, cells

if TYPE_CHECKING:
    import zarr

    from ckpt.tensors import LocalArray


def read_box(root: Path, manifest: Manifest, record: ArrayRecord, box: Box) -> np.ndarray[Any, Any]:
    """The numbers of a box of one array, as stored. Every byte read is verified."""
    out = np.empty([stop - start for start, stop in box], record.dtype)
    count = 0
    for part, values in _parts(root, manifest, record, box):
        out[within(part, box)] = values
        count += values.size
    assert count == out.size, f"{record.name} {box}: the chunks read do not cover it"
    return out


def _parts(root: Path, manifest: Manifest, record: ArrayRecord, box: Box) -> Any:
    folder = objects_dir(root, manifest.save_id)
    for coordinates in cells(box, record.shard_shape):
        key = object_key(record.name, coordinates)
        yield from read_object(folder / key, record, coordinates, manifest.objects[key], box)


def load(root: Path, manifest: Manifest, arrays: Sequence[LocalArray]) -> None:
    """Fill this rank's slices in place, from objects of whatever layout they were saved under.

    Raises:
        CheckpointError: where the checkpoint lacks an array, or has it in another shape or dtype,
            before anything is written; or where an object is missing, short or damaged, in which
            case the tensors are not to be used.
    """
    records = [_matching(manifest, array) for array in arrays]
    for array, record in zip(arrays, records, strict=True):
        count = 0
        for part in array.boxes:
            for box, values in _parts(root, manifest, record, part):
                array.write(box, values)
                count += values.size
        expected = sum(math.prod(stop - start for start, stop in box) for box in array.boxes)
        assert count == expected, f"{record.name}: the chunks read do not cover {array.boxes}"


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


def verify(root: Path, manifest: Manifest) -> int:
    """Read every byte of a checkpoint and compare with its checksums; returns how many.

    Raises CheckpointError, naming the first object that is missing, short or damaged.
    """
    folder = objects_dir(root, manifest.save_id)
    total = 0
    for key, data in metadata_objects(manifest.arrays).items():
        path = folder / key
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"object {path} is missing, the manifest lists it") from None
        except OSError as error:
            raise CheckpointError(f"object {path} cannot be read: {error.strerror}") from None
        if found != data or crc32c(found) != manifest.objects[key].checksum:
            raise CheckpointError(f"object {path} is damaged: it is not what the manifest says")
        total += len(found)
    for record in manifest.arrays:
        whole = tuple((0, size) for size in record.shape)
        for coordinates in cells(whole, record.shard_shape):
            key = object_key(record.name, coordinates)
            expected = manifest.objects[key]
            for _ in read_object(folder / key, record, coordinates, expected, whole):
                pass
            total += expected.bytes
    return total


def open_group(root: Path, step: int | None = None) -> zarr.Group:
    """The arrays of a checkpoint, read-only, through zarr-python.

    ``open_group(root)["model/layers/moe/experts/w_gate"][3, 17]`` is one expert. zarr-python takes
    a missing object for zeros, so every object's length is compared first.

    Raises CheckpointError where one is missing, short or long, or there is no checkpoint.
    """
    import zarr  # its import takes longer than reading a manifest

    manifest = read_manifest(root, step)
    folder = objects_dir(root, manifest.save_id)
    for key, record in manifest.objects.items():
        path = folder / key
        if not path.exists():
            raise CheckpointError(f"object {path} is missing, the manifest lists it")
        if path.stat().st_size != record.bytes:
            raise CheckpointError(
                f"object {path} has {path.stat().st_size} bytes, the manifest says {record.bytes}"
            )
    return zarr.open_group(folder, mode="r", zarr_format=3)
