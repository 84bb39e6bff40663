"""Suggestions of layouts that work, for a layout that does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from parallel import ParallelConfig, Topology
from parallel.layout import divisors

_TRIED = 10_000
_MOST = 3
_AXES = ("pp", "dp_replicate", "cp", "tp", "ep", "dp_shard")


def nearest_layouts(
    asked: ParallelConfig, world: int, fits: Callable[[Topology], bool]
) -> list[Topology]:
    """The three layouts of ``world`` ranks nearest to the requested layout, the nearest first.

    The distance is the sum over axes of doublings or halvings of a degree. ``dp_shard`` has a
    small weight: this axis takes the ranks that the other axes leave over.

    Args:
        asked: the requested degrees, which need not fit together.
        world: the number of ranks.
        fits: whether a layout works for the model and the data.
    """

    def distance(t: Topology) -> float:
        return sum(
            (0.01 if axis == "dp_shard" else 1.0)
            * abs(math.log2(t.size(axis) / max(getattr(asked, axis), 1)))
            for axis in _AXES
        )

    found: list[Topology] = []
    for topology in sorted(_layouts(world), key=distance)[:_TRIED]:
        if fits(topology):
            found.append(topology)
        if len(found) == _MOST:
            break
    return found


def _layouts(world: int) -> Iterator[Topology]:
    for pp in divisors(world):
        for dp_replicate in divisors(world // pp):
            inner = world // pp // dp_replicate
            for cp in divisors(inner):
                for tp in divisors(inner // cp):
                    for ep in divisors(inner):
                        yield Topology(pp, dp_replicate, inner // cp // tp, cp, tp, ep)
