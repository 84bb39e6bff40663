"""Which tensors of a state dict have an array of their own, and which share a pack.

A file takes a millisecond or two whatever its length. A tensor whose objects would be shorter than
:data:`PACK_BYTES` therefore shares an array with others, see :mod:`ckpt.format.packed`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.format.chunk_grid import CHUNK_BYTES, storage_grid
from ckpt.format.dtypes import STORAGE_DTYPES
from ckpt.format.packed import PACKS, PackedTensor
from parallel.placements import MeshLayout, Placement, RankMesh

PACK_BYTES = CHUNK_BYTES
"""A tensor with objects shorter than a chunk is packed."""
_ROW_BYTES = 32 << 20
"""The length that rows of packs aim at: one object, and what a reader keeps in memory."""


@dataclass(frozen=True)
class PlacedTensor:
    """What all ranks know of one tensor."""

    dtype: str
    layout: MeshLayout


@dataclass
class Pack:
    """A pack in the making: its tensors, and the elements of a row that they take."""

    name: str
    dtype: str
    slots: int
    mesh: RankMesh
    placements: tuple[Placement, ...]
    tensors: list[PackedTensor] = field(default_factory=list)
    length: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the array."""
        return self.slots, self.length

    @property
    def attributes(self) -> dict[str, Any]:
        """Of the array: where each tensor is, for other zarr readers."""
        return {"tensors": {t.name: {"start": t.start, "shape": t.shape} for t in self.tensors}}


@dataclass(frozen=True)
class PackPlan:
    """The arrays of a state: computed alike on every rank."""

    own: list[str]
    """The names of the tensors with an array of their own."""
    packs: list[Pack]

    @property
    def packed(self) -> tuple[PackedTensor, ...]:
        """All packed tensors."""
        return tuple(one for pack in self.packs for one in pack.tensors)


def plan_packs(tensors: Mapping[str, PlacedTensor]) -> PackPlan:
    """Which tensors become arrays, and which are packed."""
    own, packs = list[str](), list[Pack]()
    open_packs: dict[tuple[object, ...], Pack] = {}
    for name, one in tensors.items():
        layout, itemsize = one.layout, np.dtype(STORAGE_DTYPES[one.dtype]).itemsize
        shard, _ = storage_grid(layout, itemsize)
        if math.prod(shard) * itemsize >= PACK_BYTES:
            own.append(name)
            continue
        # The first slot has the longest part along each dim.
        extent = math.prod(layout.local_shape(0))
        placements = tuple(None if at is None else 0 for at in layout.placements)
        key = (one.dtype, layout.mesh, placements)
        pack = open_packs.get(key)
        if pack is None or (pack.tensors and (pack.length + extent) * itemsize > _ROW_BYTES):
            pack = Pack(
                name=f"{PACKS}/{one.dtype}-{len(packs)}",
                dtype=one.dtype,
                slots=layout.num_slots,
                mesh=layout.mesh,
                placements=placements,
            )
            open_packs[key] = pack
            packs.append(pack)
        pack.tensors.append(
            PackedTensor(name=name, pack=pack.name, shape=layout.shape,
                         placements=layout.placements, start=pack.length)
        )  # fmt: skip
        pack.length += extent
    return PackPlan(own, packs)
