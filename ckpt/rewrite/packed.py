"""The arrays of a state dict's tensors: large ones by themselves, small ones in packs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.format import TREE, MeshRecord, PlacedTensor, plan_packs, tensor_names
from ckpt.rewrite.source import Source, SourceArray
from parallel.layout import Box, box_shape
from parallel.placements import MeshLayout, RankMesh

_ONE_RANK = RankMesh((1,), (0,))


class Packed:
    """A source of a state dict with packs in place of small tensors, as a save has them.

    A tensor keeps the mesh and the placements that it was saved with. One that comes from another
    format has none, and is laid out as one rank saves it.

    Raises CheckpointError where the tree of the state names other tensors than the source has.
    """

    def __init__(self, source: Source) -> None:
        _check_tree(source)
        self.source, self.info = source, source.info
        placed = {name: _placed(array) for name, array in source.arrays.items()}
        plan = plan_packs(placed)
        self.packed = plan.packed
        self.arrays = {name: source.arrays[name] for name in plan.own}
        self._packs = {pack.name: pack for pack in plan.packs}
        for pack in plan.packs:
            self.arrays[pack.name] = SourceArray(
                shape=pack.shape,
                logical_dtype=pack.dtype,
                attributes=pack.attributes,
                compression=source.arrays[pack.tensors[0].name].compression,
                mesh=MeshRecord.of(pack.mesh),
                placements=pack.placements,
            )

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        pack = self._packs.get(name)
        if pack is None:
            return self.source.read_box(name, box)
        (first, _), (start, stop) = box
        out = np.zeros(box_shape(box), self.arrays[name].dtype)
        for row, numbers in enumerate(out):
            for one in pack.tensors:
                at = one.start
                layout = MeshLayout(one.shape, pack.mesh, one.placements)
                for held in layout.slot_boxes(first + row):
                    end = at + math.prod(box_shape(held))
                    low, high = max(at, start), min(end, stop)
                    if low < high:
                        part = self.source.read_box(one.name, held).reshape(-1)
                        numbers[low - start : high - start] = part[low - at : high - at]
                    at = end
        return out


def _placed(array: SourceArray) -> PlacedTensor:
    mesh = _ONE_RANK if array.mesh is None else array.mesh.mesh
    placements = (None,) if array.mesh is None else array.placements
    return PlacedTensor(array.logical_dtype, MeshLayout(array.shape, mesh, placements))


def _check_tree(source: Source) -> None:
    named = set(tensor_names(source.info.state[TREE]))
    stray = sorted(named ^ set(source.arrays))
    if stray:
        what = "is no array" if stray[0] in named else "is not in its tree"
        raise CheckpointError(f"the arrays are not those of the state dict: {stray[0]} {what}")
