"""Rewriting a checkpoint for another layout, one object at a time."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Manifest,
    ObjectRecord,
    committed_steps,
    objects_dir,
    pending_dir,
)
from ckpt.grid import storage_grid
from ckpt.load import read_box
from ckpt.save import SaveInfo, commit, discard, write_cells, write_metadata
from ckpt.shard import object_box, within
from parallel.layout import Box, Topology, cells

Progress = Callable[[int], None]
"""Called with the bytes of each object that has been written."""


def record_under(record: ArrayRecord, topology: Topology) -> ArrayRecord:
    """The same array as a save under ``topology`` would store it."""
    shard, chunk = storage_grid(record.layout(topology), record.dtype.itemsize)
    return record.model_copy(update={"shard_shape": shard, "chunk_shape": chunk})


def _part(values: np.ndarray[Any, Any], outer: Box, box: Box) -> np.ndarray[Any, Any]:
    return values[within(box, outer)]


def reshard(
    source: Path,
    manifest: Manifest,
    target: Path,
    topology: Topology,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Write the checkpoint ``manifest`` of ``source`` into ``target`` as ``topology`` would.

    Numbers are copied bit by bit and everything read is verified. At most one object of the
    target and the part of one object of the source are in memory. Committed like any save: until
    it is whole, ``target`` has no manifest of it.

    Raises CheckpointError where ``target`` has this step already, or the source is damaged, or
    the target cannot be written.
    """
    if manifest.step in committed_steps(target):
        raise CheckpointError(f"{target} already has a checkpoint of step {manifest.step}")
    records = [record_under(record, topology) for record in manifest.arrays]
    save_id = f"{manifest.step:08d}-reshard-{secrets.token_hex(4)}"
    folder = objects_dir(target, save_id)
    info = SaveInfo(
        save_id=save_id,
        step=manifest.step,
        topology=topology,
        state=manifest.state,
        spec=manifest.spec,
        spec_hash=manifest.spec_hash,
    )
    try:
        pending_dir(target, save_id).mkdir(parents=True)
        objects: dict[str, ObjectRecord] = write_metadata(folder, records)
        for old, new in zip(manifest.arrays, records, strict=True):
            whole = tuple((0, size) for size in new.shape)
            for coordinates in cells(whole, new.shard_shape):
                box = object_box(new, coordinates)
                values = read_box(source, manifest, old, box)
                written = write_cells(folder, new, [coordinates], partial(_part, values, box))
                objects.update(written)
                progress(sum(record.bytes for record in written.values()))
        return commit(target, info, records, objects)
    except OSError as error:
        discard(target, info)
        raise CheckpointError(
            f"{target} cannot be written: {error.strerror}: {error.filename or target}"
        ) from None
    except BaseException:
        discard(target, info)
        raise
