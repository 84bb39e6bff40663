"""Writing a checkpoint from one process, chunk by chunk, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.errors import CheckpointError
from ckpt.format import ArrayRecord, Manifest, ObjectLayout, ReadInto, committed_steps
from ckpt.store import Location, ReportBytes, open_store
from ckpt.write.commit import SaveInfo, begin, commit, discard
from ckpt.write.objects import WRITERS, sync, write_metadata, write_objects
from parallel.layout import cells, whole_box


def save_streamed(
    root: Location,
    info: SaveInfo,
    arrays: Sequence[tuple[ArrayRecord, ReadInto]],
    progress: ReportBytes = lambda _: None,
    threads: int = WRITERS,
) -> Manifest:
    """Write and commit a checkpoint from one process, chunk by chunk.

    Args:
        root: the checkpoint folder or store.
        info: what the manifest holds besides the arrays.
        arrays: each array with a function that fills in the numbers of a box, in the stored dtype.
            The function is called once for each chunk, in row-major order of the objects and of the
            chunks in them, from several threads.
        progress: called with the bytes of each object that was written, by any thread.
        threads: how many objects are written at a time.

    Returns:
        The manifest, durable.

    Raises:
        CheckpointError: where ``root`` already has this step, or cannot be written. After an error
            of any kind the written objects are removed.
    """
    store = open_store(root)
    if info.step in committed_steps(store):
        raise CheckpointError(f"{store.where()} already has a checkpoint of step {info.step}")
    records = [record for record, _ in arrays]
    try:
        begin(store, info, 0)
        objects = write_metadata(store, info, records)
        for record, read in arrays:
            grid = cells(whole_box(record.shape), record.shard_shape)
            layouts = [ObjectLayout(record, at) for at in grid]
            todo = [(layout, read) for layout in layouts]
            objects |= write_objects(store, info, todo, progress, threads, 0)
        sync(store, info, objects)
        return commit(store, info, records, objects)
    except OSError as error:
        discard(store, info)
        where = error.filename or store.where()
        raise CheckpointError(
            f"{store.where()} cannot be written: {error.strerror}: {where}"
        ) from None
    except BaseException:
        discard(store, info)
        raise
