"""Writing a checkpoint: every rank its own objects, then one manifest."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Manifest,
    ObjectRecord,
    OtherRankError,
    decode_manifest,
    draft_path,
    encode_manifest,
    fsync_dir,
    manifest_path,
    metadata_objects,
    object_key,
    objects_dir,
    pending_dir,
    read_manifest,
)
from ckpt.shard import ReadBox, write_bytes, write_object
from ckpt.tensors import LocalArray
from parallel.layout import ShardLayout, Topology, cells

Agree = Callable[[bool], bool]
"""A barrier that also asks: every rank gives its word, all learn whether all said yes."""


@dataclass(frozen=True)
class SaveInfo:
    """What a manifest says besides the arrays. ``save_id`` must be new, and alike on all ranks."""

    save_id: str
    step: int
    topology: Topology
    state: dict[str, Any]
    spec: dict[str, Any]
    spec_hash: str


def own_cells(record: ArrayRecord, layout: ShardLayout, rank: int) -> Iterable[tuple[int, ...]]:
    """The objects of an array that ``rank`` writes. Copies take turns, so that each has work."""
    index = layout.replica_index(rank)
    grid = [-(-size // step) for size, step in zip(record.shape, record.shard_shape, strict=True)]
    for coordinates in chain.from_iterable(
        cells(box, record.shard_shape) for box in layout.boxes(rank)
    ):
        flat = 0
        for coordinate, size in zip(coordinates, grid, strict=True):
            flat = flat * size + coordinate
        if flat % layout.num_replicas == index:
            yield coordinates


def save(
    root: Path, info: SaveInfo, arrays: Sequence[LocalArray], rank: int, agree: Agree
) -> Manifest | None:
    """Write and commit a checkpoint; every rank calls with the same arrays in the same order.

    Each rank works out from the topology alone which objects are its own. It leaves a receipt of
    what it wrote; rank 0 reads the receipts, checks that together they are the whole, and
    publishes the manifest last, never over another.

    Args:
        root: the checkpoint folder, shared by all ranks.
        info: what else the manifest holds.
        arrays: this rank's slices; a rank without any part of an array still names it.
        rank: this rank.
        agree: see :data:`Agree`; ``lambda ok: ok`` for one process.

    Returns:
        The manifest, durable, on rank 0; None elsewhere.

    Raises:
        CheckpointError: on every rank if any could not write; nothing is committed then, and
            what was written is removed.
    """
    folder = objects_dir(root, info.save_id)
    records = [array.spec.record(info.topology) for array in arrays]
    pending = pending_dir(root, info.save_id)
    failure: Exception | None = None
    try:
        pending.mkdir(parents=True, exist_ok=True)
        receipt: dict[str, ObjectRecord] = {}
        if rank == 0:
            receipt.update(write_metadata(folder, records))
        for array, record in zip(arrays, records, strict=True):
            layout = array.spec.layout(info.topology)
            coordinates = own_cells(record, layout, rank)
            receipt.update(write_cells(folder, record, coordinates, array.read))
        _write_receipt(pending, rank, receipt)
    except Exception as error:  # the others must learn of it, whatever it is
        failure = error
    if not agree(failure is None):
        _abandon(root, info, failure)

    manifest: Manifest | None = None
    if rank == 0:
        try:
            objects = _read_receipts(pending, info.topology.world)
            manifest = commit(root, info, records, objects)
        except Exception as error:
            failure = error
    if not agree(failure is None):
        _abandon(root, info, failure)
    return manifest


def write_metadata(folder: Path, records: list[ArrayRecord]) -> dict[str, ObjectRecord]:
    """Write every zarr.json of a save."""
    written = {}
    for key, data in metadata_objects(records).items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        written[key] = write_bytes(path, data)
    _sync_folders(folder, written)
    return written


def write_cells(
    folder: Path, record: ArrayRecord, coordinates: Iterable[tuple[int, ...]], read_box: ReadBox
) -> dict[str, ObjectRecord]:
    """Write some objects of one array."""
    written = {}
    for cell in coordinates:
        key = object_key(record.name, cell)
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        written[key] = write_object(path, record, cell, read_box)
    _sync_folders(folder, written)
    return written


def _sync_folders(folder: Path, keys: Iterable[str]) -> None:
    """Make the entries of every folder from ``folder`` to the objects durable."""
    parents = set()
    for key in keys:
        path = (folder / key).parent
        while path not in parents and path != folder.parent:
            parents.add(path)
            path = path.parent
    for parent in parents:
        fsync_dir(parent)


def _write_receipt(pending: Path, rank: int, receipt: dict[str, ObjectRecord]) -> None:
    body = {key: [record.bytes, record.checksum] for key, record in receipt.items()}
    write_bytes(pending / f"rank-{rank}.json", json.dumps(body).encode())


def _read_receipts(pending: Path, world: int) -> dict[str, ObjectRecord]:
    objects: dict[str, ObjectRecord] = {}
    for rank in range(world):
        path = pending / f"rank-{rank}.json"
        if not path.exists():
            raise CheckpointError(
                f"rank {rank} left no receipt {path}: checkpoint.path must be a folder that every "
                f"rank shares"
            )
        for key, (length, checksum) in json.loads(path.read_bytes()).items():
            assert key not in objects, f"two ranks wrote {key}"
            objects[key] = ObjectRecord(bytes=length, checksum=checksum)
    return objects


def commit(
    root: Path, info: SaveInfo, records: list[ArrayRecord], objects: dict[str, ObjectRecord]
) -> Manifest:
    """Publish the manifest of objects that are all durable: the moment a checkpoint exists.

    Raises CheckpointError where the objects are not the whole, or the step has a manifest.
    """
    manifest = Manifest(
        save_id=info.save_id,
        step=info.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        topology=info.topology.as_dict(),
        arrays=records,
        objects=dict(sorted(objects.items())),
        state=info.state,
        spec=info.spec,
        spec_hash=info.spec_hash,
        versions={name: version(name) for name in ("torch", "zarr", "numpy", "convoy-moe")},
    )
    data = encode_manifest(manifest)
    path = manifest_path(root, info.step)
    decode_manifest(data, path)  # refuses what no reader would take
    path.parent.mkdir(parents=True, exist_ok=True)
    fsync_dir(root / "objects")
    for parent in (root, *root.resolve().parents):
        with contextlib.suppress(OSError):  # those that are not ours may not be opened
            fsync_dir(parent)
    draft = draft_path(root, info.save_id)
    write_bytes(draft, data)
    try:
        # link, not rename: it fails where the name is taken.
        os.link(draft, path)
    except FileExistsError:
        raise CheckpointError(
            f"step {info.step} already has a checkpoint in {root}; save elsewhere, or move "
            f"{path.name} away"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()
    fsync_dir(path.parent)
    shutil.rmtree(pending_dir(root, info.save_id), ignore_errors=True)
    return manifest


def discard(root: Path, info: SaveInfo) -> None:
    """Remove what a save that failed has written; one that was committed after all is left."""
    with contextlib.suppress(CheckpointError):
        if read_manifest(root, info.step).save_id == info.save_id:
            return
    shutil.rmtree(objects_dir(root, info.save_id), ignore_errors=True)
    shutil.rmtree(pending_dir(root, info.save_id), ignore_errors=True)


def _abandon(root: Path, info: SaveInfo, failure: Exception | None) -> NoReturn:
    what = f"checkpoint of step {info.step} in {root} is not saved"
    if failure is None:
        raise OtherRankError(f"{what}: another rank could not write its part")
    discard(root, info)  # every rank has stopped writing: they have all given their word
    if not isinstance(failure, OSError):
        raise failure
    raise CheckpointError(f"{what}: {failure.strerror}: {failure.filename or root}")
