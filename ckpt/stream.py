"""Writing a checkpoint from one process, with numbers that are read as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ckpt.save import SaveInfo, commit, discard, write_cells, write_metadata
from ckpt.shard import ReadBox, object_box, within
from parallel.layout import Box, cells

Progress = Callable[[int], None]
"""Called with the bytes of each object that has been written."""


def _part(values: np.ndarray[Any, Any], outer: Box, box: Box) -> np.ndarray[Any, Any]:
    return values[within(box, outer)]


def save_streamed(
    root: Path,
    info: SaveInfo,
    arrays: Sequence[tuple[ArrayRecord, ReadBox]],
    progress: Progress = lambda _: None,
) -> Manifest:
    """Write and commit a checkpoint, object by object.

    Each array comes with a function that gives the numbers of a box of it, as they are stored; it
    is called once for each object, in row-major order, and at most one object is in memory.
    Committed like any save: until it is whole, ``root`` has no manifest of it.

    Raises CheckpointError where ``root`` has this step already, or cannot be written. What an error
    of any kind leaves behind is removed.
    """
    if info.step in committed_steps(root):
        raise CheckpointError(f"{root} already has a checkpoint of step {info.step}")
    records = [record for record, _ in arrays]
    folder = objects_dir(root, info.save_id)
    try:
        pending_dir(root, info.save_id).mkdir(parents=True)
        objects: dict[str, ObjectRecord] = write_metadata(folder, records)
        for record, read in arrays:
            whole = tuple((0, size) for size in record.shape)
            for coordinates in cells(whole, record.shard_shape):
                box = object_box(record, coordinates)
                values = read(box)
                written = write_cells(folder, record, [coordinates], partial(_part, values, box))
                objects.update(written)
                progress(sum(each.bytes for each in written.values()))
        return commit(root, info, records, objects)
    except OSError as error:
        discard(root, info)
        raise CheckpointError(
            f"{root} cannot be written: {error.strerror}: {error.filename or root}"
        ) from None
    except BaseException:
        discard(root, info)
        raise
