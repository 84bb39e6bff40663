"""One rank's part of an array, held as torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.format import STORAGE_DTYPES, ArrayRecord, CheckpointError
from ckpt.grid import storage_grid
from ckpt.shard import within
from parallel.layout import Box, ShardLayout, Topology

_BIT_PATTERNS = {"uint16": torch.uint16, "uint8": torch.uint8}


@dataclass(frozen=True)
class ArraySpec:
    """An array as every rank knows it, whatever it holds of it. ``shape`` is logical."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    splits: tuple[tuple[str, ...], ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    """As in ShardLayout."""

    @property
    def logical_dtype(self) -> str:
        """The dtype's name in a manifest. Raises CheckpointError for one that has none."""
        name = str(self.dtype).removeprefix("torch.")
        if name not in STORAGE_DTYPES:
            raise CheckpointError(
                f"array {self.name} has dtype {name}; one of {', '.join(STORAGE_DTYPES)} is needed"
            )
        return name

    def layout(self, topology: Topology) -> ShardLayout:
        """Who holds which slice under ``topology``."""
        return ShardLayout(self.shape, self.splits, topology, self.stages)

    def record(self, topology: Topology) -> ArrayRecord:
        """The array as a save under ``topology`` stores it; the same on every rank."""
        itemsize = np.dtype(STORAGE_DTYPES[self.logical_dtype]).itemsize
        shard, chunk = storage_grid(self.layout(topology), itemsize)
        return ArrayRecord(
            name=self.name,
            shape=self.shape,
            logical_dtype=self.logical_dtype,
            splits=self.splits,
            shard_shape=shard,
            chunk_shape=chunk,
            attributes=dict(self.attributes),
        )


class LocalArray:
    """This rank's slices of an array: one tensor, or one for each index of a stacked first dim.

    Args:
        spec: the array.
        boxes: the slices, in logical coordinates: one, none, or with ``stacked`` any number that
            differ in the first dim alone.
        pieces: a tensor of the box's shape, if there is one; or, with ``stacked``, one of the shape
            of the other dims for each index of the first that the boxes have.
    """

    def __init__(
        self, spec: ArraySpec, boxes: Sequence[Box], pieces: Sequence[Tensor], stacked: bool = False
    ) -> None:
        self.spec, self.boxes, self.pieces, self.stacked = spec, list(boxes), list(pieces), stacked
        first = [i for box in boxes for i in range(*box[0])] if stacked else list(range(len(boxes)))
        self._piece_at = dict(zip(first, self.pieces, strict=True))
        for piece in self.pieces:
            sizes = tuple(stop - start for start, stop in boxes[0][1 if stacked else 0 :])
            assert tuple(piece.shape) == sizes, (spec.name, piece.shape, sizes)
            assert piece.dtype == spec.dtype, (spec.name, piece.dtype)

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        """The numbers of a box within these slices, as they are stored."""
        if not self.stacked:
            return _to_numpy(self.pieces[0][within(box, self.boxes[0])])
        rest = within(box[1:], self.boxes[0][1:])
        return np.stack([_to_numpy(self._piece_at[i][rest]) for i in range(*box[0])])

    def write(self, box: Box, values: np.ndarray[Any, Any]) -> None:
        """Put stored numbers into a box within these slices."""
        with torch.no_grad():
            if not self.stacked:
                _copy(self.pieces[0][within(box, self.boxes[0])], values)
                return
            rest = within(box[1:], self.boxes[0][1:])
            for i, value in zip(range(*box[0]), values, strict=True):
                _copy(self._piece_at[i][rest], value)


def _storage_view(tensor: Tensor) -> Tensor:
    bits = _BIT_PATTERNS.get(STORAGE_DTYPES[str(tensor.dtype).removeprefix("torch.")])
    return tensor if bits is None else tensor.view(bits)


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return _storage_view(tensor.detach().cpu().contiguous()).numpy()


def _copy(target: Tensor, values: np.ndarray[Any, Any]) -> None:
    # ascontiguousarray would turn a scalar into a vector; copy() also makes it writable for torch.
    source = torch.from_numpy(np.array(values, order="C", copy=True))
    _storage_view(target).copy_(source)
