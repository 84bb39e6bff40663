"""One rank's part of an array, held as torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.errors import CheckpointError
from ckpt.format import STORAGE_DTYPES, Array, ArrayRecord, Compression, storage_grid
from ckpt.store import Bytes
from parallel.layout import Box, ShardLayout, Topology, box_shape, within

_BIT_PATTERNS = {
    getattr(torch, name): getattr(torch, stored)
    for name, stored in STORAGE_DTYPES.items()
    if name != stored and hasattr(torch, name)
}


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

    def record(self, topology: Topology, compression: Compression = "none") -> ArrayRecord:
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
            compression=compression,
            stages=self.stages,
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
            sizes = box_shape(boxes[0][1 if stacked else 0 :])
            assert tuple(piece.shape) == sizes, (spec.name, piece.shape, sizes)
            assert piece.dtype == spec.dtype, (spec.name, piece.dtype)

    def read_into(self, box: Box, out: Array) -> None:
        """Copy the numbers of a box within these slices, as they are stored. From a CUDA device
        into pinned memory the copy is only begun: synchronize before ``out`` is read."""
        parts = self._host_parts(box)
        if parts is not None:
            for i, part in enumerate(parts):
                np.copyto(out[i, ...] if self.stacked else out, part)  # torch would start threads
            return
        target = torch.from_numpy(out)
        for to, source in zip(self._split(target), self._parts(box), strict=True):
            to.copy_(_storage_view(source.detach()), non_blocking=True)

    def write(self, box: Box, values: Array) -> None:
        """Put stored numbers into a box within these slices."""
        # torch wants memory that it may write to, even where it only reads.
        source = torch.from_numpy(values if values.flags.writeable else values.copy())
        with torch.no_grad():
            for part, piece in zip(self._split(source), self._parts(box), strict=True):
                _storage_view(piece).copy_(part)

    def memory(self, box: Box) -> list[Bytes] | None:
        """The bytes of a box within these slices, in order, to be read into; None where they are
        on a device, or scattered."""
        parts = self._host_parts(box)
        if parts is None or not all(part.flags.c_contiguous for part in parts):
            return None
        return [part.reshape(-1).view(np.uint8) for part in parts]

    def _host_parts(self, box: Box) -> list[Array] | None:
        """Views of the numbers of a box, where they are in host memory. Cut by numpy: a chunk may
        have parts by the hundred, and torch takes ten times as long for each."""
        pieces, place = self._pieces(box)
        if not all(piece.is_cpu for piece in pieces):
            return None
        where: tuple[Any, ...] = (*place, ...)  # an array, of a scalar too
        return [_storage_view(piece.detach()).numpy()[where] for piece in pieces]

    def _parts(self, box: Box) -> list[Tensor]:
        pieces, place = self._pieces(box)
        return [piece[place] for piece in pieces]

    def _pieces(self, box: Box) -> tuple[list[Tensor], tuple[slice, ...]]:
        """Those that have a part of a box, and which."""
        if not self.stacked:
            return self.pieces[:1], within(box, self.boxes[0])
        rest = within(box[1:], self.boxes[0][1:])
        return [self._piece_at[i] for i in range(*box[0])], rest

    def _split(self, values: Tensor) -> Sequence[Tensor]:
        return values.unbind(0) if self.stacked else [values]


def _storage_view(tensor: Tensor) -> Tensor:
    bits = _BIT_PATTERNS.get(tensor.dtype)
    return tensor if bits is None else tensor.view(bits)
