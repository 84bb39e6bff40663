"""Reading a checkpoint: any slice of any array, verified, onto any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Manifest,
    metadata_objects,
    objects_dir,
    objects_key,
    read_manifest,
)
from ckpt.locations import Location, open_store
from ckpt.names import Missing, renamed
from ckpt.objects import ObjectRecord
from ckpt.saving import THREADS, Progress
from ckpt.shard import Array, ObjectLayout, Target, read_object, within
from ckpt.store import Bytes, Store
from parallel.layout import Box, cells

if TYPE_CHECKING:
    import zarr

    from ckpt.tensors import LocalArray


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


def read_nowhere(store: Store, save_id: str, layout: ObjectLayout, expected: ObjectRecord) -> None:
    """Read all of an object and compare. Raises CheckpointError, without the object's name, where
    it is not what ``expected`` says, and OSError where it cannot be read."""
    with store.open(f"{objects_key(save_id)}/{layout.key}") as reader:
        read_object(reader, layout, expected, layout.box, _Nowhere())


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


def load(
    root: Location,
    manifest: Manifest,
    arrays: Sequence[LocalArray],
    rename: Mapping[str, str] | None = None,
    missing: Missing = "refuse",
) -> list[str]:
    """Fill this rank's slices in place, from objects of whatever layout they were saved under.

    Several objects are read at a time, straight into the tensors where those are in host memory.
    Arrays of the checkpoint that are not among ``arrays`` are not read.

    Args:
        root: the checkpoint folder or store.
        manifest: what is read.
        arrays: this rank's slices.
        rename: names in ``arrays`` by names in the checkpoint, see :func:`ckpt.names.renamed`.
        missing: what becomes of arrays that the checkpoint lacks.

    Returns:
        The names of the arrays that the checkpoint lacks.

    Raises:
        CheckpointError: where the checkpoint lacks an array, or has it in another shape or dtype,
            before anything is written; or where an object is missing, short or damaged, in which
            case the tensors are not to be used.
    """
    store = open_store(root)
    names = renamed([record.name for record in manifest.arrays], rename or {})
    wanted = {array.spec.name for array in arrays}
    for new, old in names.items():
        if new != old and new not in wanted:
            raise CheckpointError(f"rename of {old}: the model has no array {new}")
    kept = [n for n in wanted if n not in names] if missing == "keep" else []
    taken = [array for array in arrays if array.spec.name not in kept]
    records = [_matching(manifest, array, names) for array in taken]
    parts = [
        (array, box, ObjectLayout(record, coordinates))
        for array, record in zip(taken, records, strict=True)
        for box in array.boxes
        for coordinates in cells(box, record.shard_shape)
    ]

    # The largest first: none is left for the end, when the other threads have nothing more to do.
    parts.sort(key=lambda part: -part[2].length)

    def read(part: tuple[LocalArray, Box, ObjectLayout]) -> int:
        array, box, layout = part
        return _read_one(store, manifest, layout, box, array)

    with ThreadPoolExecutor(THREADS) as pool:
        count = sum(pool.map(read, parts))
    boxes = [box for array in taken for box in array.boxes]
    expected = sum(math.prod(stop - start for start, stop in box) for box in boxes)
    assert count == expected, "the chunks read do not cover the arrays"
    return sorted(kept)


def _matching(manifest: Manifest, array: LocalArray, names: Mapping[str, str]) -> ArrayRecord:
    spec = array.spec
    record = manifest.array(names.get(spec.name, spec.name))
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
    import zarr  # here, for its seconds of import

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
