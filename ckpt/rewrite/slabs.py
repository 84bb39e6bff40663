"""The order in which a rewrite visits an array: slabs that fit a memory budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from parallel.layout import Box, box_shape, intersect, whole_box, within


def row_major_boxes(shape: tuple[int, ...], itemsize: int, most_bytes: int) -> Iterator[Box]:
    """Boxes that lie end to end in row-major order and make up an array, none above
    ``most_bytes`` but single elements. None where the array has no elements."""
    if math.prod(shape) == 0:
        return
    dim, inner = len(shape), itemsize
    while dim > 0 and inner * shape[dim - 1] <= most_bytes:
        dim -= 1
        inner *= shape[dim]
    if dim == 0:
        yield whole_box(shape)
        return
    cut = dim - 1  # the dim that is taken in runs; those after it are whole
    step = max(1, most_bytes // inner)
    rest = whole_box(shape[dim:])
    for outer in product(*map(range, shape[:cut])):
        for start in range(0, shape[cut], step):
            run = (start, min(start + step, shape[cut]))
            yield (*((i, i + 1) for i in outer), run, *rest)


class Slabs:
    """Reads the boxes of an object's chunks, in row-major order of the chunks, by slabs of many.

    A slab is a run of chunks that make up a box. Each number of the source is read once, whatever
    the grids of source and target are.
    """

    def __init__(
        self,
        read: Callable[[Box], np.ndarray[Any, Any]],
        whole: Box,
        chunk_shape: tuple[int, ...],
        itemsize: int,
        slab_bytes: int,
    ) -> None:
        self.read = read
        grid = tuple(
            -(-length // size) for length, size in zip(box_shape(whole), chunk_shape, strict=True)
        )
        chunk_bytes = math.prod(chunk_shape) * itemsize
        # No generator of a method: it would hold this object, and with it a slab, in a circle.
        self._boxes = _of_chunks(row_major_boxes(grid, chunk_bytes, slab_bytes), chunk_shape, whole)
        self._slab: tuple[Box, np.ndarray[Any, Any]] | None = None

    def __call__(self, box: Box) -> np.ndarray[Any, Any]:
        """The numbers of a chunk of the slab that was read last, or of the next slab."""
        while self._slab is None or intersect(box, self._slab[0]) != box:
            self._slab = None  # two slabs are never in memory
            slab = next(self._boxes)
            self._slab = slab, self.read(slab)
        base, values = self._slab
        return values[within(box, base)]


def _of_chunks(runs: Iterator[Box], chunk_shape: tuple[int, ...], whole: Box) -> Iterator[Box]:
    for run in runs:
        yield tuple(
            (base + first * size, min(base + last * size, stop))
            for (first, last), size, (base, stop) in zip(run, chunk_shape, whole, strict=True)
        )
