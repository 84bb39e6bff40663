"""Rewriting a checkpoint for another layout, one object at a time."""

from __future__ import annotations

import secrets
from functools import partial

from ckpt.format import ArrayRecord, Manifest
from ckpt.grid import storage_grid
from ckpt.loading import read_box_into
from ckpt.locations import Location
from ckpt.saving import Progress, SaveInfo
from ckpt.stream import save_streamed
from parallel.layout import ShardLayout, Topology


def record_under(record: ArrayRecord, topology: Topology) -> ArrayRecord:
    """The same array cut for ``topology``, along the dims that the saving layout cut; a save under
    ``topology`` may cut others (stages, tensor parallelism), which any layout loads as well."""
    layout = ShardLayout(record.shape, record.splits, topology)
    shard, chunk = storage_grid(layout, record.dtype.itemsize)
    update = {"shard_shape": shard, "chunk_shape": chunk, "stages": ()}
    return record.model_copy(update=update)


def reshard(
    source: Location,
    manifest: Manifest,
    target: Location,
    topology: Topology,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Write the checkpoint ``manifest`` of ``source`` into ``target``, for ``topology``.

    Numbers are copied bit by bit and everything read is verified. A few chunks
    of the target and of the source are in memory. Committed like any save: until
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
        parent=manifest.save_id,
    )
    arrays = [
        (record_under(record, topology), partial(read_box_into, source, manifest, record))
        for record in manifest.arrays
    ]
    return save_streamed(target, info, arrays, progress)
