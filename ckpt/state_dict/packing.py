"""This rank's slices of the arrays that a state becomes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ckpt.format import PackedTensor, PackPlan, PlacedTensor
from ckpt.local_array import ArraySpec, LocalArray
from ckpt.state_dict.held import shard_of
from ckpt.state_dict.packed_row import GatheredRow, PackedRow
from parallel.layout import Box, box_shape, within
from parallel.placements import MeshLayout, RankMesh


def local_arrays(
    made: PackPlan,
    described: Mapping[str, PlacedTensor],
    tensors: Mapping[str, Tensor],
    rank: int,
) -> list[LocalArray]:
    """This rank's slices of all arrays."""
    arrays = []
    for name in made.own:
        layout, dtype = described[name].layout, getattr(torch, described[name].dtype)
        spec = ArraySpec(name, layout.shape, dtype, mesh=layout.mesh, placements=layout.placements)
        arrays.append(LocalArray(spec, *pieces(layout, tensors.get(name), rank)))
    for pack in made.packs:
        spec = ArraySpec(
            pack.name, pack.shape, getattr(torch, pack.dtype), attributes=pack.attributes,
            mesh=pack.mesh, placements=pack.placements,
        )  # fmt: skip
        slot = MeshLayout(pack.shape, pack.mesh, pack.placements).slot(rank)
        if slot is None:
            arrays.append(LocalArray(spec, [], []))
            continue
        parts = list(parts_of(pack.tensors, pack.mesh, tensors, rank))
        direct = all(piece.is_cpu and piece.is_contiguous() for _, piece in parts)
        arrays.append((PackedRow if direct else GatheredRow)(spec, slot, parts))
    return arrays


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
