"""Which objects a rank writes: computed from the layouts, without communication."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from ckpt.format import ArrayRecord, grid_of
from parallel.layout import ShardLayout, cells
from parallel.placements import MeshLayout, flat_index


def own_cells(
    record: ArrayRecord,
    layout: ShardLayout | MeshLayout,
    rank: int,
    ranks: Sequence[int] | None = None,
) -> Iterator[tuple[int, ...]]:
    """The objects of an array that ``rank`` writes; the replicas of a slice share its objects.

    Args:
        record: the array.
        layout: which rank holds which slice of the array.
        rank: a rank.
        ranks: the ranks that write to the store, for a node's own store those of the node; None
            for all. Each object that any of them holds is written by exactly one of them.

    Yields:
        The coordinates of each object in the array's grid of objects.
    """
    boxes = layout.boxes(rank)
    if not boxes:
        return  # perhaps no rank of the array's mesh
    index, count = _turn(layout, rank, ranks)
    grid = grid_of(record)
    for coordinates in chain.from_iterable(cells(box, record.shard_shape) for box in boxes):
        if flat_index(coordinates, grid) % count == index:
            yield coordinates


def _turn(
    layout: ShardLayout | MeshLayout, rank: int, ranks: Sequence[int] | None
) -> tuple[int, int]:
    """The index of ``rank`` among the writers that hold its slice, and the number of these."""
    if ranks is None:
        return layout.replica_index(rank), layout.num_replicas
    # The boxes of two ranks are either equal or disjoint.
    replicas = [other for other in ranks if layout.boxes(other) == layout.boxes(rank)]
    return replicas.index(rank), len(replicas)
