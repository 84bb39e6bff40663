"""This rank's slices of an array, as torch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ckpt.errors import CheckpointError
from ckpt.format import (
    STORAGE_DTYPES,
    Array,
    ArrayRecord,
    Compression,
    MeshRecord,
    storage_grid,
)
from ckpt.store import Bytes
from parallel.layout import Box, ShardLayout, Topology, box_shape, intersect, within
from parallel.placements import MeshLayout, Placement, RankMesh

_BIT_PATTERNS = {
    getattr(torch, name): getattr(torch, stored)
    for name, stored in STORAGE_DTYPES.items()
    if name != stored and hasattr(torch, name)
}


@dataclass(frozen=True)
class ArraySpec:
    """What all ranks know of an array.

    ``shape`` is that of the unsharded array; ``splits`` and ``stages`` are the fields of
    :class:`parallel.layout.ShardLayout`. An array with a ``mesh`` has ``placements`` on that mesh
    instead, see :class:`parallel.placements.MeshLayout`. ``attributes`` become attributes of the
    zarr array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    splits: tuple[tuple[str, ...], ...] = ()
    """Empty where no dim is cut."""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    stages: tuple[int, ...] = ()
    mesh: RankMesh | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def logical_dtype(self) -> str:
        """The dtype's name in a manifest. Raises CheckpointError where it cannot be stored."""
        name = str(self.dtype).removeprefix("torch.")
        if name not in STORAGE_DTYPES:
            raise CheckpointError(
                f"array {self.name} has dtype {name}; one of {', '.join(STORAGE_DTYPES)} is needed"
            )
        return name

    def layout(self, topology: Topology) -> ShardLayout | MeshLayout:
        """Which rank holds which slice under ``topology``."""
        if self.mesh is not None:
            return MeshLayout(self.shape, self.mesh, self.placements)
        return ShardLayout(self.shape, self._splits, topology, self.stages)

    @property
    def _splits(self) -> tuple[tuple[str, ...], ...]:
        return self.splits or ((),) * len(self.shape)

    def record(self, topology: Topology, compression: Compression = "none") -> ArrayRecord:
        """The array's record in the manifest of a save under ``topology``; equal on every rank."""
        itemsize = np.dtype(STORAGE_DTYPES[self.logical_dtype]).itemsize
        shard, chunk = storage_grid(self.layout(topology), itemsize)
        return ArrayRecord(
            name=self.name,
            shape=self.shape,
            logical_dtype=self.logical_dtype,
            splits=self._splits,
            shard_shape=shard,
            chunk_shape=chunk,
            compression=compression,
            separator=".",
            stages=self.stages,
            mesh=None if self.mesh is None else MeshRecord.of(self.mesh),
            placements=self.placements,
            attributes=dict(self.attributes),
        )


class LocalArray:
    """This rank's slices of an array: one tensor, or one for each index of a stacked first dim.

    Args:
        spec: the array.
        boxes: the slices, in coordinates of the unsharded array. With ``stacked`` the boxes differ
            only in the first dim.
        pieces: without ``stacked`` a tensor of the box's shape for each box. With ``stacked`` a
            tensor for each index of the first dim in the boxes, of the shape of the other dims.
        stacked: whether each index of the first dim has a tensor of its own.

    Raises ValueError where number, shapes or dtypes of the tensors are not those of the boxes.
    """

    def __init__(
        self, spec: ArraySpec, boxes: Sequence[Box], pieces: Sequence[Tensor], stacked: bool = False
    ) -> None:
        self.spec, self.boxes, self.pieces, self.stacked = spec, list(boxes), list(pieces), stacked
        first = [i for box in boxes for i in range(*box[0])] if stacked else list(range(len(boxes)))
        if len(first) != len(self.pieces):
            what = "indices of the first dim in boxes" if stacked else "boxes"
            raise ValueError(
                f"array {spec.name}: pieces ({len(self.pieces)}) must be as many as {what} "
                f"({len(first)})"
            )
        self._piece_at = dict(zip(first, self.pieces, strict=True))
        for i, piece in enumerate(self.pieces):
            sizes = box_shape(boxes[0][1:] if stacked else boxes[i])
            if (tuple(piece.shape), piece.dtype) != (sizes, spec.dtype):
                raise ValueError(
                    f"array {spec.name}: a tensor of shape {tuple(piece.shape)} and {piece.dtype} "
                    f"must have the shape of its box {sizes} and {spec.dtype}"
                )

    def read_into(self, box: Box, out: Array) -> None:
        """Copy the numbers of a box within these slices to ``out``, in the stored dtype.

        From a CUDA device to pinned memory the copy is asynchronous: synchronize before ``out`` is
        read.
        """
        parts = self._host_parts(box)
        if parts is not None:
            for i, part in enumerate(parts):
                np.copyto(
                    out[i, ...] if self.stacked else out, part
                )  # not by torch, which would start threads
            return
        target = torch.from_numpy(out)
        for to, source in zip(self._split(target), self._parts(box), strict=True):
            to.copy_(storage_view(source.detach()), non_blocking=True)

    def write(self, box: Box, values: Array) -> None:
        """Set the numbers of a box within these slices from ``values``, in the stored dtype."""
        # torch warns about memory that is read-only, even where torch only reads.
        source = torch.from_numpy(values if values.flags.writeable else values.copy())
        with torch.no_grad():
            for part, piece in zip(self._split(source), self._parts(box), strict=True):
                storage_view(piece).copy_(part)

    def memory(self, box: Box) -> list[Bytes] | None:
        """Buffers for the bytes of a box within these slices, in order; None where the tensors are
        on a device or not contiguous."""
        parts = self._host_parts(box)
        if parts is None or not all(part.flags.c_contiguous for part in parts):
            return None
        return [part.reshape(-1).view(np.uint8) for part in parts]

    def _host_parts(self, box: Box) -> list[Array] | None:
        """Views of the numbers of a box; None where the tensors are not in host memory.

        The views are numpy's: a chunk may have hundreds, and torch takes ten times as long each.
        """
        pieces, place = self._pieces(box)
        if not all(piece.is_cpu for piece in pieces):
            return None
        where: tuple[Any, ...] = (*place, ...)  # the ellipsis keeps a scalar an array
        return [storage_view(piece.detach()).numpy()[where] for piece in pieces]

    def _parts(self, box: Box) -> list[Tensor]:
        pieces, place = self._pieces(box)
        return [piece[place] for piece in pieces]

    def _pieces(self, box: Box) -> tuple[list[Tensor], tuple[slice, ...]]:
        """The tensors that hold a part of a box, and the place of the part in each of them."""
        if not self.stacked:
            for held, piece in zip(self.boxes, self.pieces, strict=True):
                if intersect(box, held) == box:
                    return [piece], within(box, held)
            raise AssertionError(f"{self.spec.name}: {box} is within none of {self.boxes}")
        rest = within(box[1:], self.boxes[0][1:])
        return [self._piece_at[i] for i in range(*box[0])], rest

    def _split(self, values: Tensor) -> Sequence[Tensor]:
        return values.unbind(0) if self.stacked else [values]


def storage_view(tensor: Tensor) -> Tensor:
    """The numbers of a tensor in the stored dtype; bfloat16 and float8 as bit patterns."""
    bits = _BIT_PATTERNS.get(tensor.dtype)
    return tensor if bits is None else tensor.view(bits)
