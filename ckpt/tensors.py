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
        return ShardLayout(self.shape, self.splits, topology)

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
    """This rank's slice of an array: one tensor, or one for each index of a stacked first dim.

    Args:
        spec: the array.
        box: the slice, in logical coordinates.
        pieces: a single tensor of the box's shape; or, with ``stacked``, box[0] tensors of the
            shape of the other dims.
    """

    def __init__(
        self, spec: ArraySpec, box: Box, pieces: Sequence[Tensor], stacked: bool = False
    ) -> None:
        self.spec, self.box, self.pieces, self.stacked = spec, box, list(pieces), stacked
        sizes = tuple(stop - start for start, stop in box)
        expected = (sizes[1:], sizes[0]) if stacked else (sizes, 1)
        for piece in self.pieces:
            assert tuple(piece.shape) == expected[0], (spec.name, piece.shape, expected)
            assert piece.dtype == spec.dtype, (spec.name, piece.dtype)
        assert len(self.pieces) == expected[1], (spec.name, len(self.pieces), expected)

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        """The numbers of a box within this slice, as they are stored."""
        if not self.stacked:
            return _to_numpy(self.pieces[0][within(box, self.box)])
        (first, last), base = box[0], self.box[0][0]
        rest = within(box[1:], self.box[1:])
        return np.stack([_to_numpy(self.pieces[i - base][rest]) for i in range(first, last)])

    def write(self, box: Box, values: np.ndarray[Any, Any]) -> None:
        """Put stored numbers into a box within this slice."""
        with torch.no_grad():
            if not self.stacked:
                _copy(self.pieces[0][within(box, self.box)], values)
                return
            rest = within(box[1:], self.box[1:])
            for i, value in zip(range(*box[0]), values, strict=True):
                _copy(self.pieces[i - self.box[0][0]][rest], value)


def _storage_view(tensor: Tensor) -> Tensor:
    bits = _BIT_PATTERNS.get(STORAGE_DTYPES[str(tensor.dtype).removeprefix("torch.")])
    return tensor if bits is None else tensor.view(bits)


def _to_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    return _storage_view(tensor.detach().cpu().contiguous()).numpy()


def _copy(target: Tensor, values: np.ndarray[Any, Any]) -> None:
    # ascontiguousarray would turn a scalar into a vector; copy() also makes it writable for torch.
    source = torch.from_numpy(np.array(values, order="C", copy=True))
    _storage_view(target).copy_(source)
