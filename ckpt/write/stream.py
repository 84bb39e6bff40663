"""Writing a checkpoint from one process, with numbers that are read as they are needed."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.errors import CheckpointError
from ckpt.format import ArrayRecord, Manifest, ObjectLayout, ReadInto, committed_steps
from ckpt.store import Location, Progress, open_store
from ckpt.write.commit import SaveInfo, begin, commit, discard
from ckpt.write.objects import WRITERS, settle, write_metadata, write_objects
from parallel.layout import cells, whole_box


def save_streamed(
    root: Location,
    info: SaveInfo,
    arrays: Sequence[tuple[ArrayRecord, ReadInto]],
    progress: Progress = lambda _: None,
    threads: int = WRITERS,
) -> Manifest:
    """Write and commit a checkpoint, chunk by chunk.

    Each array comes with a function that fills in the numbers of a box of it, as they are stored;
    it is called once for each chunk, in row-major order of objects and within them, by ``threads``
    threads that each take an object. Committed like any save: until it is
    whole, ``root`` has no manifest of it.

    Raises CheckpointError where ``root`` has this step already, or cannot be written. What an error
    of any kind leaves behind is removed.
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
        settle(store, info, objects)
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
