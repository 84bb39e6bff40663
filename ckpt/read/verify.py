"""Checking every byte of a checkpoint against its manifest."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.errors import CheckpointError
from ckpt.format import (
    Manifest,
    ObjectLayout,
    ObjectRecord,
    metadata_objects,
    objects_key,
    read_manifest,
)
from ckpt.read.box import Nowhere, named, read_one
from ckpt.store import THREADS, Location, ReportBytes, Store, open_store

if TYPE_CHECKING:
    import zarr


def verify(root: Location, manifest: Manifest, progress: ReportBytes = lambda _: None) -> int:
    """Read every byte of a checkpoint and check its checksums; returns the number of bytes.

    Raises CheckpointError, naming the first object that is missing, short or damaged.
    """
    for problem in _problems(root, manifest, progress):
        raise CheckpointError(problem)
    return manifest.total_bytes


def find_damage(
    root: Location, manifest: Manifest, progress: ReportBytes = lambda _: None
) -> list[str]:
    """Read every byte of a checkpoint; returns a line for each object that is missing, short or
    damaged."""
    return list(_problems(root, manifest, progress))


def _problems(root: Location, manifest: Manifest, progress: ReportBytes) -> Iterator[str]:
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
                read_one(store, manifest, layouts[key], layouts[key].box, Nowhere())
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
    except OSError as error:
        raise named(error, store, full) from None
    if found != data or ObjectRecord.of(found) != manifest.objects[key]:
        raise CheckpointError(
            f"object {store.where(full)} is damaged: it is not what the manifest says"
        )


def _verify_metadata(store: Store, manifest: Manifest) -> None:
    for key, data in metadata_objects(manifest.arrays).items():
        _check_metadata(store, manifest, key, data)


def open_group(root: Path, step: int | None = None) -> zarr.Group:
    """The arrays of a checkpoint, read-only, through zarr-python.

    ``open_group(root)["model/layers/moe/experts/w_gate"][3, 17]`` is one expert. zarr-python reads
    a missing object as zeros: every object's length, and every zarr.json, is checked first.

    Raises CheckpointError where an object is missing, short or long, or there is no checkpoint.
    """
    import zarr  # here: the import takes seconds

    manifest = read_manifest(root, step)
    folder = root / objects_key(manifest.save_id)
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
