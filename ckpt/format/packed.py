"""Packs: arrays that hold many tensors, each too small for objects of its own.

A pack is an array of shape [slots, length]. The tensors of a pack lie on one mesh, and the same
mesh dims cut each of them: row s of the pack is what slot s holds of all tensors. A tensor begins
at element ``start`` of each row. Its boxes lie there end to end, each in row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import AfterValidator

from ckpt.format.array import ArrayRecord, Compression, Count, check_name
from ckpt.format.object_index import Record
from parallel.layout import Box, box_shape
from parallel.placements import MeshLayout, Placement

TREE = "state_dict"
"""The key of a manifest's ``state`` that has the JSON of a saved state dict."""
PACKS = "packed"
"""The group of the packs in a checkpoint."""


class PackedTensor(Record):
    """One tensor in a pack. The pack's record has the dtype and the mesh."""

    name: Annotated[str, AfterValidator(check_name)]
    pack: str
    shape: tuple[Count, ...]
    placements: tuple[Placement, ...]
    start: Count


@dataclass(frozen=True)
class PackPlace:
    """A packed tensor with the record of its pack."""

    tensor: PackedTensor
    pack: ArrayRecord

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.tensor.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.tensor.shape

    @property
    def logical_dtype(self) -> str:
        """The tensor's dtype."""
        return self.pack.logical_dtype

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored numbers."""
        return self.pack.dtype

    @property
    def placements(self) -> tuple[Placement, ...]:
        """As in :class:`parallel.placements.MeshLayout`."""
        return self.tensor.placements

    @property
    def compression(self) -> Compression:
        """Of the pack's chunks."""
        return self.pack.compression

    @property
    def attributes(self) -> dict[str, Any]:
        """None: a packed tensor has no zarr array of its own."""
        return {}

    @property
    def layout(self) -> MeshLayout:
        """Which rank holds which slice of the tensor."""
        assert self.pack.mesh is not None
        return MeshLayout(self.tensor.shape, self.pack.mesh.mesh, self.tensor.placements)

    def boxes(self, slot: int) -> Iterator[tuple[int, Box]]:
        """The boxes of a slot, each with the place of its first element in the pack's row."""
        at = self.tensor.start
        for box in self.layout.slot_boxes(slot):
            yield at, box
            at += math.prod(box_shape(box))

    def check(self) -> None:
        """Raises ValueError where the tensor does not fit in the pack."""
        layout, name = self.layout, self.tensor.name
        slots, length = self.pack.shape
        if layout.num_slots != slots:
            raise ValueError(f"{name} has {layout.num_slots} slots in a pack of {slots}")
        cutting = [placement is not None for placement in self.tensor.placements]
        if cutting != [placement is not None for placement in self.pack.placements]:
            raise ValueError(f"{name} is cut along other mesh dims than its pack")
        # The first slot has the longest part along each dim.
        longest = sum(math.prod(box_shape(box)) for box in layout.slot_boxes(0))
        if self.tensor.start + longest > length:
            raise ValueError(f"{name} reaches beyond its pack")


StoredTensor: TypeAlias = "ArrayRecord | PackPlace"
"""A tensor as it was saved: an array, or a part of a pack."""


def place(tensor: PackedTensor, packs: Mapping[str, ArrayRecord]) -> PackPlace:
    """The place of a tensor. Raises ValueError where its pack is none, or does not fit."""
    pack = packs.get(tensor.pack)
    if pack is None or pack.mesh is None or len(pack.shape) != 2:
        raise ValueError(f"{tensor.name} is in {tensor.pack!r}, which is no pack")
    found = PackPlace(tensor, pack)
    found.check()
    return found
