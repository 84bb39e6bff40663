"""Which box of one array is which box of another: the one thing that reading and writing share.

A link is read in both directions. Arrays of another project are made of boxes of Convoy's arrays,
and Convoy's arrays of boxes of theirs, by the same list of links.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any, Literal, NamedTuple

import numpy as np

from ckpt.rewrite import Source, SourceArray, SourceInfo
from parallel.layout import Box, box_shape, intersect, within

Values = np.ndarray[Any, Any]
Side = Literal["ours", "theirs"]


class Link(NamedTuple):
    """A box of an array of theirs that has the numbers of a box of an array of ours."""

    theirs: str
    their_box: Box
    ours: str
    our_box: Box
    axes: tuple[int, ...]
    """For each dim of theirs, which dim of ours it is. In every other dim of ours the box has one
    index."""

    def in_theirs(self, box: Box) -> Box:
        """Where a box within ``our_box`` lies in the array of theirs."""
        moved = []
        for dim, (first, _) in zip(self.axes, self.their_box, strict=True):
            shift = first - self.our_box[dim][0]
            moved.append((box[dim][0] + shift, box[dim][1] + shift))
        return tuple(moved)

    def in_ours(self, box: Box) -> Box:
        """Where a box within ``their_box`` lies in the array of ours."""
        moved = list(self.our_box)
        for dim, (start, stop), (first, _) in zip(self.axes, box, self.their_box, strict=True):
            shift = self.our_box[dim][0] - first
            moved[dim] = (start + shift, stop + shift)
        return tuple(moved)

    def as_ours(self, values: Values, shape: tuple[int, ...]) -> Values:
        """Numbers in the order of their dims, in the shape of ours."""
        order = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return values.transpose(order).reshape(shape)

    def as_theirs(self, values: Values) -> Values:
        """Numbers in the shape of ours, in the order of their dims."""
        kept = sorted(self.axes)
        squeezed = values.reshape([values.shape[dim] for dim in kept])
        return squeezed.transpose([kept.index(dim) for dim in self.axes])


class _Index:
    """Links by the leading dims in which each of them has one index: a box of one expert is found
    without a look at all other experts' links."""

    def __init__(self, boxes: list[tuple[Box, Link]]) -> None:
        self.leading = min(_leading_ones(box) for box, _ in boxes)
        self.links: dict[tuple[int, ...], list[tuple[Box, Link]]] = {}
        for box, link in boxes:
            key = tuple(start for start, _ in box[: self.leading])
            self.links.setdefault(key, []).append((box, link))

    def touching(self, box: Box) -> Iterator[tuple[Box, Link]]:
        """Of each link that has numbers of ``box``, these numbers' box and the link."""
        for key in product(*(range(start, stop) for start, stop in box[: self.leading])):
            for own, link in self.links.get(key, ()):
                common = intersect(own, box)
                if common is not None:
                    yield common, link


def _leading_ones(box: Box) -> int:
    count = 0
    for start, stop in box:
        if stop - start != 1:
            break
        count += 1
    return count


class Linked:
    """A :class:`ckpt.rewrite.Source`: the arrays of one side, made of those of the other.

    Args:
        source: has the arrays of the other side.
        links: make up every array of ``arrays``, each number once.
        arrays: of ``side``.
        side: whose arrays this source has.
        info: of this source.
    """

    def __init__(
        self,
        source: Source,
        links: Iterable[Link],
        arrays: Mapping[str, SourceArray],
        side: Side,
        info: SourceInfo,
    ) -> None:
        self.source, self.side, self.info, self.arrays = source, side, info, dict(arrays)
        boxes: dict[str, list[tuple[Box, Link]]] = {}
        for link in links:
            name, box = self._own(link)
            boxes.setdefault(name, []).append((box, link))
        self._links = {name: _Index(of) for name, of in boxes.items()}

    def _own(self, link: Link) -> tuple[str, Box]:
        ours = self.side == "ours"
        return (link.ours, link.our_box) if ours else (link.theirs, link.their_box)

    def read_box(self, name: str, box: Box) -> Values:
        """See :class:`ckpt.rewrite.Source`."""
        out = np.empty(box_shape(box), self.arrays[name].dtype)
        for common, link in self._links[name].touching(box) if name in self._links else ():
            if self.side == "ours":
                values = self.source.read_box(link.theirs, link.in_theirs(common))
                values = link.as_ours(values, box_shape(common))
            else:
                values = link.as_theirs(self.source.read_box(link.ours, link.in_ours(common)))
            out[within(common, box)] = values
        return out
