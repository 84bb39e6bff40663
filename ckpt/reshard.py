"""Rewriting a checkpoint for another layout, one object at a time."""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path

from ckpt.format import ArrayRecord, Manifest
from ckpt.grid import storage_grid
from ckpt.load import read_box
from ckpt.save import SaveInfo
from ckpt.stream import Progress, save_streamed
from parallel.layout import Topology


def record_under(record: ArrayRecord, topology: Topology) -> ArrayRecord:
    """The same array cut for ``topology``, along the dims that the saving layout cut; a save under
    ``topology`` may cut others (stages, tensor parallelism), which any layout loads as well."""
    shard, chunk = storage_grid(record.layout(topology), record.dtype.itemsize)
    return record.model_copy(update={"shard_shape": shard, "chunk_shape": chunk})


def reshard(
    source: Path,
    manifest: Manifest,
    target: Path,
    topology: Topology,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Write the checkpoint ``manifest`` of ``source`` into ``target``, for ``topology``.

    Numbers are copied bit by bit and everything read is verified. At most one object of the
    target and the part of one object of the source are in memory. Committed like any save: until
    it is whole, ``target`` has no manifest of it.

    Raises CheckpointError where ``target`` has this step already, or the source is damaged, or
    the target cannot be written.
    """
    info = SaveInfo(
        save_id=f"{manifest.step:08d}-reshard-{secrets.token_hex(4)}",
        step=manifest.step,
        topology=topology,
        state=manifest.state,
        spec=manifest.spec,
        spec_hash=manifest.spec_hash,
    )
    arrays = [
        (record_under(record, topology), partial(read_box, source, manifest, record))
        for record in manifest.arrays
    ]
    return save_streamed(target, info, arrays, progress)
