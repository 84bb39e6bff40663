"""What a rank writes, worked out from the layouts alone: nothing is gathered, nobody plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

from ckpt.format import ArrayRecord
from parallel.layout import ShardLayout, cells


def own_cells(
    record: ArrayRecord, layout: ShardLayout, rank: int, ranks: Sequence[int] | None = None
) -> Iterator[tuple[int, ...]]:
    """The objects of an array that ``rank`` writes. Copies take turns, so that each has work.

    Args:
        record: the array.
        layout: who holds what of it.
        rank: a rank.
        ranks: those that write to the store: all of them, or those of a node. What they hold is
            written whole, each object by one of them.
    """
    index, count = _turn(layout, rank, ranks)
    grid = [-(-size // step) for size, step in zip(record.shape, record.shard_shape, strict=True)]
    boxes = layout.boxes(rank)
    for coordinates in chain.from_iterable(cells(box, record.shard_shape) for box in boxes):
        flat = 0
        for coordinate, size in zip(coordinates, grid, strict=True):
            flat = flat * size + coordinate
        if flat % count == index:
            yield coordinates


def _turn(layout: ShardLayout, rank: int, ranks: Sequence[int] | None) -> tuple[int, int]:
    """Which of the writers that hold ``rank``'s slice it is, and how many there are."""
    if ranks is None:
        return layout.replica_index(rank), layout.num_replicas
    # Boxes of two ranks are the same or have nothing in common.
    alike = [other for other in ranks if layout.boxes(other) == layout.boxes(rank)]
    return alike.index(rank), len(alike)
