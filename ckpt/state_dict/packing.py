"""Which arrays a state becomes: one for each large tensor, and packs of the small ones.

A file takes a millisecond or two whatever its length. A tensor whose objects would be shorter than
:data:`PACK_BYTES` therefore shares an array with others, see :mod:`ckpt.format.packed`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ckpt.format import CHUNK_BYTES, PACKS, STORAGE_DTYPES, PackedTensor, storage_grid
from ckpt.local_array import ArraySpec, LocalArray
from ckpt.state_dict.held import Described, shard_of
from ckpt.state_dict.packed_row import GatheredRow, PackedRow
from parallel.layout import Box, box_shape, within
from parallel.placements import MeshLayout, Placement, RankMesh

PACK_BYTES = CHUNK_BYTES
"""A tensor with objects shorter than a chunk is packed."""
_ROW_BYTES = 32 << 20
"""The length that rows of packs aim at: one object, and what a reader keeps in memory."""


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

    def spec(self) -> ArraySpec:
        """The pack as an array. Its attributes say where each tensor is, for other zarr readers."""
        places = {one.name: {"start": one.start, "shape": one.shape} for one in self.tensors}
        return ArraySpec(
            name=self.name,
            shape=(self.slots, self.length),
            dtype=getattr(torch, self.dtype),
            splits=((), ()),
            attributes={"tensors": places},
            mesh=self.mesh,
            placements=self.placements,
        )


@dataclass(frozen=True)
class Plan:
    """The arrays of a state: computed alike on every rank."""

    own: list[ArraySpec]
    packs: list[Pack]

    @property
    def packed(self) -> tuple[PackedTensor, ...]:
        """All packed tensors."""
        return tuple(one for pack in self.packs for one in pack.tensors)


def plan(tensors: Mapping[str, Described]) -> Plan:
    """Which tensors become arrays, and which are packed."""
    own, packs = [], list[Pack]()
    open_packs: dict[tuple[object, ...], Pack] = {}
    for name, one in tensors.items():
        layout, itemsize = one.layout, np.dtype(STORAGE_DTYPES[one.dtype]).itemsize
        shard, _ = storage_grid(layout, itemsize)
        if math.prod(shard) * itemsize >= PACK_BYTES:
            own.append(_own(name, one))
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
    return Plan(own, packs)


def _own(name: str, one: Described) -> ArraySpec:
    layout = one.layout
    return ArraySpec(
        name=name,
        shape=layout.shape,
        dtype=getattr(torch, one.dtype),
        splits=((),) * len(layout.shape),
        mesh=layout.mesh,
        placements=layout.placements,
    )


def local_arrays(made: Plan, tensors: Mapping[str, Tensor], rank: int) -> list[LocalArray]:
    """This rank's slices of all arrays."""
    arrays = [
        LocalArray(spec, *pieces(_layout(spec), tensors.get(spec.name), rank)) for spec in made.own
    ]
    for pack in made.packs:
        spec = pack.spec()
        slot = _layout(spec).slot(rank)
        if slot is None:
            arrays.append(LocalArray(spec, [], []))
            continue
        parts = list(parts_of(pack.tensors, pack.mesh, tensors, rank))
        direct = all(piece.is_cpu and piece.is_contiguous() for _, piece in parts)
        arrays.append((PackedRow if direct else GatheredRow)(spec, slot, parts))
    return arrays


def _layout(spec: ArraySpec) -> MeshLayout:
    assert spec.mesh is not None
    return MeshLayout(spec.shape, spec.mesh, spec.placements)


def pieces(layout: MeshLayout, tensor: Tensor | None, rank: int) -> tuple[list[Box], list[Tensor]]:
    """The boxes that ``rank`` holds of a tensor, and the part of its local shard in each."""
    slot = layout.slot(rank)
    if slot is None or tensor is None:
        return [], []
    shard = shard_of(tensor)
    whole = tuple((0, size) for size in shard.shape)
    places = (within(box, whole) for box in layout.local_boxes(slot))
    return layout.slot_boxes(slot), [shard[place] for place in places]


def parts_of(
    packed: Iterable[PackedTensor], mesh: RankMesh, tensors: Mapping[str, Tensor], rank: int
) -> Iterator[tuple[int, Tensor]]:
    """Each piece of this rank's tensors with its place in the row."""
    for one in packed:
        layout = MeshLayout(one.shape, mesh, one.placements)
        yield from parts_at(one.start, *pieces(layout, tensors[one.name], rank))


def parts_at(
    start: int, boxes: Iterable[Box], of: Iterable[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """The pieces of one tensor, each with its place in the row."""
    for box, piece in zip(boxes, of, strict=True):
        yield start, piece
        start += math.prod(box_shape(box))
