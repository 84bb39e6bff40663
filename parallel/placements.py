"""Which rank holds which slice of a DTensor, as plain arithmetic.

:mod:`parallel.layout` names the axes of Convoy's own meshes. A DTensor of any other program lies on
a mesh of its own, with a placement for each mesh dim. This module uses neither torch nor process
groups: the slices of any rank can be computed on a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from typing import TypeAlias

from parallel.layout import Box

Placement: TypeAlias = "int | tuple[int, int] | None"
"""What one mesh dim does with a tensor.

``None`` replicates the tensor (``Replicate()``), ``d`` cuts dim d (``Shard(d)``), and ``(d, f)``
cuts dim d as if it had been cut in f parts before (``_StridedShard(d, split_factor=f)``).
"""

Spans: TypeAlias = "tuple[tuple[int, int], ...]"
"""Half-open ranges of one dim, ascending and disjoint. A local shard has them end to end."""


@dataclass(frozen=True)
class RankMesh:
    """A mesh of ranks: its ``shape``, and the global ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if math.prod(self.shape) != len(self.ranks) or len(set(self.ranks)) != len(self.ranks):
            raise ValueError(f"a mesh of shape {self.shape} must have one rank for each place")

    def __reduce__(self) -> tuple[type[RankMesh], tuple[object, ...]]:
        return RankMesh, (self.shape, self.ranks)  # without the table of places

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The place of ``rank`` along each mesh dim; None where the mesh lacks the rank."""
        place = self._places.get(rank)
        return None if place is None else _unravel(place, self.shape)


@dataclass(frozen=True)
class MeshLayout:
    """The slices of a tensor of ``shape`` over ``mesh``, with a placement for each mesh dim.

    Placements apply from the first mesh dim to the last. Each cut is that of ``torch.chunk``: the
    last parts may be shorter, or empty. A slot is a set of ranks with equal slices; slots are
    numbered in row-major order of the mesh dims that cut the tensor.
    """

    shape: tuple[int, ...]
    mesh: RankMesh
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        # ValueError and not assert: a checkpoint's layouts are read from a file.
        if len(self.placements) != len(self.mesh.shape):
            raise ValueError(
                f"placements {self.placements} must be one for each dim of {self.mesh.shape}"
            )
        for placement in self.placements:
            dim, factor = placement if isinstance(placement, tuple) else (placement, 1)
            if dim is not None and not (0 <= dim < len(self.shape) and factor >= 1):
                raise ValueError(f"placement {placement} cuts no dim of {self.shape}")

    @cached_property
    def _cutting(self) -> tuple[int, ...]:
        return tuple(i for i, placement in enumerate(self.placements) if placement is not None)

    @cached_property
    def num_slots(self) -> int:
        """The number of different slices, empty ones included."""
        return math.prod(self.mesh.shape[i] for i in self._cutting)

    def slot(self, rank: int) -> int | None:
        """The slot of ``rank``; None where the mesh lacks the rank."""
        at = self.mesh.coordinate(rank)
        if at is None:
            return None
        return flat_index(
            [at[i] for i in self._cutting], [self.mesh.shape[i] for i in self._cutting]
        )

    def slot_boxes(self, slot: int) -> list[Box]:
        """The boxes of a slot in row-major order; none where the slot is empty."""
        return [tuple(box) for box in product(*self._spans(slot))]

    def local_boxes(self, slot: int) -> list[Box]:
        """The place of each of :meth:`slot_boxes` in the local shard, which has the boxes end to
        end along each dim that is cut."""
        return [tuple(box) for box in product(*map(_end_to_end, self._spans(slot)))]

    def local_shape(self, slot: int) -> tuple[int, ...]:
        """The shape of the local shard of a slot."""
        return tuple(sum(stop - start for start, stop in of) for of in self._spans(slot))

    def _spans(self, slot: int) -> list[Spans]:
        along = _unravel(slot, [self.mesh.shape[i] for i in self._cutting])
        spans: list[Spans] = [((0, size),) if size else () for size in self.shape]
        for i, index in zip(self._cutting, along, strict=True):
            dim, factor = _parts_of(self.placements[i])
            spans[dim] = cut(spans[dim], self.mesh.shape[i], index, factor)
        return spans

    def boxes(self, rank: int) -> list[Box]:
        """The slices that ``rank`` holds; none where the mesh lacks the rank."""
        slot = self.slot(rank)
        return [] if slot is None else self.slot_boxes(slot)

    @property
    def num_replicas(self) -> int:
        """The number of ranks that hold each slice."""
        return len(self.mesh.ranks) // self.num_slots

    def replica_index(self, rank: int) -> int:
        """The index of ``rank``, a rank of the mesh, among the ranks that hold its slice."""
        at = self.mesh.coordinate(rank)
        assert at is not None, f"rank {rank} is not in the mesh"
        rest = [i for i in range(len(at)) if i not in self._cutting]
        return flat_index([at[i] for i in rest], [self.mesh.shape[i] for i in rest])

    def grain(self) -> tuple[int, ...]:
        """The largest cell of a regular grid in which each cell belongs to one slot's box."""
        cuts: list[list[tuple[int, int]]] = [[] for _ in self.shape]
        for i in self._cutting:
            dim, factor = _parts_of(self.placements[i])
            cuts[dim].append((self.mesh.shape[i], factor))
        return tuple(_grain(size, tuple(of)) for size, of in zip(self.shape, cuts, strict=True))


def _parts_of(placement: Placement) -> tuple[int, int]:
    assert placement is not None
    return placement if isinstance(placement, tuple) else (placement, 1)


def cut(spans: Spans, parts: int, index: int, factor: int = 1) -> Spans:
    """Part ``index`` of ``parts`` of a dim of which ``spans`` are left.

    With a ``factor`` above 1, ``spans`` are first cut in ``factor`` pieces, and the result is part
    ``index`` of each piece (``_StridedShard``).
    """
    total = sum(stop - start for start, stop in spans)
    piece = -(-total // factor)
    found: list[tuple[int, int]] = []
    for first in range(0, total, piece) if total else ():
        last = min(first + piece, total)
        step = -(-(last - first) // parts)
        start = min(first + index * step, last)
        found += _at(spans, start, min(start + step, last))
    return _merged(found)


def _at(spans: Spans, start: int, stop: int) -> list[tuple[int, int]]:
    """Places ``start`` to ``stop`` of the spans laid end to end."""
    found, done = [], 0
    for low, high in spans:
        a, b = max(start, done), min(stop, done + high - low)
        if a < b:
            found.append((low + a - done, low + b - done))
        done += high - low
    return found


def _end_to_end(spans: Spans) -> Spans:
    ends = [0, *accumulate(stop - start for start, stop in spans)]
    return tuple(pairwise(ends))


def _merged(spans: Sequence[tuple[int, int]]) -> Spans:
    merged: list[tuple[int, int]] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)


@lru_cache(maxsize=1 << 12)
def _grain(size: int, cuts: tuple[tuple[int, int], ...]) -> int:
    every: set[Spans] = {((0, size),)} if size else {()}
    for parts, factor in cuts:
        every = {cut(spans, parts, i, factor) for spans in every for i in range(parts)}
    ends = {end for spans in every for span in spans for end in span} - {0, size}
    return math.gcd(*ends) if ends else max(size, 1)


def flat_index(at: Sequence[int], shape: Sequence[int]) -> int:
    """The row-major number of an index of a grid."""
    flat = 0
    for index, size in zip(at, shape, strict=True):
        flat = flat * size + index
    return flat


def _unravel(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    at = []
    for size in reversed(shape):
        place, index = divmod(place, size)
        at.append(index)
    return tuple(reversed(at))
