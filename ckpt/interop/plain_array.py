"""Reading a box of an array that lies in a file as plain bytes, with few reads of few bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError, readable
from parallel.layout import Box, box_shape

_FEW_BYTES = 64 << 10
_MUCH = 1 << 20


def read_plain(
    path: Path, offset: int, shape: Sequence[int], dtype: np.dtype[Any], box: Box
) -> np.ndarray[Any, Any]:
    """The numbers of ``box`` of an array of ``shape`` in row-major order at ``offset`` of a file.

    Numbers that lie end to end are read at once. Rows of a few bytes are read together with the
    bytes between the rows, up to a mebibyte at a time.

    Raises CheckpointError, naming the file, where it ends too soon or cannot be read.
    """
    sizes = box_shape(box)
    out = np.empty(sizes, dtype)
    if out.size == 0:
        return out
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]  # in elements
    cut = _first_dim_of_run(shape, sizes, strides, dtype.itemsize)
    with readable(path):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for index in product(*(range(start, stop) for start, stop in box[:cut])):
            start = sum(i * s for i, s in zip(index, strides, strict=False))
            rows = 1
            if cut < len(shape):
                start += box[cut][0] * strides[cut]
                rows = sizes[cut]
            inner = (rows, *shape[cut + 1 :]) if cut < len(shape) else ()
            run = np.empty(inner, dtype)
            _read_into(handle, path, offset + start * dtype.itemsize, run)
            target = tuple(i - b[0] for i, b in zip(index, box, strict=False))
            picked = tuple(slice(*extent) for extent in box[cut + 1 :])
            out[target] = run[(slice(None), *picked)] if inner else run
    finally:
        os.close(handle)
    return out


def _first_dim_of_run(
    shape: Sequence[int], sizes: Sequence[int], strides: Sequence[int], itemsize: int
) -> int:
    """The first of the dims that one read takes: of the dims after this one the box has all, or
    so much that the rest costs little."""
    cut = len(shape)
    while cut > 0:
        whole = all(sizes[i] == shape[i] for i in range(cut, len(shape)))
        nbytes = sizes[cut - 1] * strides[cut - 1] * itemsize
        small = math.prod(sizes[cut:]) * itemsize < _FEW_BYTES and nbytes <= _MUCH
        if not (whole or small):
            break
        cut -= 1
    return cut


def _read_into(handle: int, path: Path, at: int, target: np.ndarray[Any, Any]) -> None:
    view = target.reshape(-1).view(np.uint8).data
    while view:
        with readable(path):
            count = os.preadv(handle, [view], at)
        if not count:
            raise CheckpointError(f"{path} ends too soon")
        view, at = view[count:], at + count
