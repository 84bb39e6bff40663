"""Sources that change what another source yields: names, stacks, dtypes and descriptions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from ckpt.format import (
    FLOATS,
    convert,
)
from ckpt.rewrite.source import Source, SourceArray, SourceInfo, changed
from parallel.layout import Box, box_shape

Index = tuple[int, ...]
"""Of the first dims of an array."""


class Selected:
    """Some arrays of a source, under other names: ``names`` maps each new name to the source's."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self.source, self.names = source, dict(names)
        self.info = changed(source.info, sorted(names.items()))
        self.arrays = {new: source.arrays[old] for new, old in names.items()}

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        return self.source.read_box(self.names[name], box)


class Converted:
    """A source with some of its arrays in another float dtype, rounded to nearest, ties to even.

    Args:
        source: arrays that are not named stay as they are.
        names: of the arrays; an array that has no floats of 16 bits or more stays as it is.
        dtype: the new logical dtype.
    """

    def __init__(self, source: Source, names: Iterable[str], dtype: str) -> None:
        self.source, self.dtype = source, dtype
        self.names = {n for n in names if source.arrays[n].logical_dtype in FLOATS}
        self.info = changed(source.info, (dtype, sorted(self.names)))
        self.arrays = {
            name: replace(array, logical_dtype=dtype) if name in self.names else array
            for name, array in source.arrays.items()
        }

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        values = self.source.read_box(name, box)
        if name not in self.names:
            return values
        return convert(values, self.source.arrays[name].logical_dtype, self.dtype)


def _reshaped(array: SourceArray, shape: tuple[int, ...]) -> SourceArray:
    """An array of another shape: the placements on a mesh were those of its old dims."""
    return replace(array, shape=shape, mesh=None, placements=())


class Stacked:
    """Arrays of a source as indexes of larger arrays.

    Args:
        source: what has the arrays.
        members: by the new name, the source's array at every index of the first dims: ``{(0,): a,
            (1,): b}`` for an array of one dim more, ``{(0, 0): a, (0, 1): b}`` for one of two more,
            ``{(): a}`` for an array as it is. Members of one array have one shape and dtype.
        attributes: of the new arrays, by name; one that is as it was keeps its own.
    """

    def __init__(
        self,
        source: Source,
        members: Mapping[str, Mapping[Index, str]],
        attributes: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.source, self.members = source, {name: dict(of) for name, of in members.items()}
        self.info = changed(source.info, sorted((n, sorted(m.items())) for n, m in members.items()))
        self.arrays: dict[str, SourceArray] = {}
        for name, of in self.members.items():
            one = source.arrays[next(iter(of.values()))]
            if () not in of:
                lead = tuple(max(at) + 1 for at in zip(*of, strict=True))
                assert len(of) == math.prod(lead), name
                one = SourceArray(
                    (*lead, *one.shape), one.logical_dtype, (), attributes.get(name, {})
                )
            self.arrays[name] = one

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        members = self.members[name]
        if () in members:
            return self.source.read_box(members[()], box)
        dims = len(next(iter(members)))
        out = np.empty(box_shape(box), self.arrays[name].dtype)
        for at in product(*(range(start, stop) for start, stop in box[:dims])):
            place = tuple(i - start for i, (start, _) in zip(at, box, strict=False))
            out[place] = self.source.read_box(members[at], box[dims:])
        return out


class Unstacked:
    """The inverse of :class:`Stacked`: single indexes of a source's first dims as arrays.

    Args:
        source: what has the arrays.
        members: by the new name, the source's array and the index.
    """

    def __init__(self, source: Source, members: Mapping[str, tuple[str, Index]]) -> None:
        self.source, self.members = source, dict(members)
        self.info = changed(source.info, sorted(members.items()))
        self.arrays = {
            name: SourceArray(source.arrays[old].shape[len(at) :], source.arrays[old].logical_dtype)
            for name, (old, at) in members.items()
        }

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        old, at = self.members[name]
        first = tuple((i, i + 1) for i in at)
        return self.source.read_box(old, (*first, *box)).reshape(box_shape(box))


class Transposed:
    """A source with the last two dims of some of its arrays swapped."""

    def __init__(self, source: Source, names: Iterable[str]) -> None:
        self.source, self.names = source, frozenset(names)
        self.info = changed(source.info, ("transposed", sorted(self.names)))
        self.arrays = dict(source.arrays)
        for name in self.names:
            array = source.arrays[name]
            *first, rows, columns = array.shape
            self.arrays[name] = _reshaped(array, (*first, columns, rows))

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        if name not in self.names:
            return self.source.read_box(name, box)
        *first, rows, columns = box
        return self.source.read_box(name, (*first, columns, rows)).swapaxes(-1, -2)


Extent = tuple[int, int]
"""A stretch of rows, from the first to one past the last."""


class Rows:
    """Arrays made of rows of a source's arrays. Rows are the last dim but one.

    Args:
        source: what has the arrays.
        rows: by the new name, the source's array, and the stretches of its rows that follow one
            another in the new array; None takes the array as it is.
    """

    def __init__(
        self, source: Source, rows: Mapping[str, tuple[str, tuple[Extent, ...] | None]]
    ) -> None:
        self.source, self.rows = source, dict(rows)
        self.info = changed(source.info, sorted(rows.items()))
        self.arrays: dict[str, SourceArray] = {}
        for name, (old, extents) in self.rows.items():
            array = source.arrays[old]
            if extents is not None:
                *first, size, columns = array.shape
                assert all(0 <= start <= stop <= size for start, stop in extents), (name, extents)
                count = sum(stop - start for start, stop in extents)
                array = _reshaped(array, (*first, count, columns))
            self.arrays[name] = array

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        old, extents = self.rows[name]
        if extents is None:
            return self.source.read_box(old, box)
        *first, (low, high), columns = box
        out = np.empty(box_shape(box), self.arrays[name].dtype)
        at = 0
        for start, stop in extents:
            begin, end = max(low, at), min(high, at + stop - start)
            if begin < end:
                part = (start + begin - at, start + end - at)
                found = self.source.read_box(old, (*first, part, columns))
                out[..., begin - low : end - low, :] = found
            at += stop - start
        return out


class Joined:
    """Arrays made of several arrays of a source, one after another along the last dim but one.

    Args:
        source: what has the arrays.
        pieces: by the new name, the source's arrays, of one dtype and of equal other dims; a single
            one stays as it is.
    """

    def __init__(self, source: Source, pieces: Mapping[str, tuple[str, ...]]) -> None:
        self.source, self.pieces = source, dict(pieces)
        self.info = changed(source.info, ("joined", sorted(pieces.items())))
        self.arrays: dict[str, SourceArray] = {}
        for name, of in self.pieces.items():
            array = source.arrays[of[0]]
            if len(of) > 1:
                *first, _, columns = array.shape
                count = sum(source.arrays[piece].shape[-2] for piece in of)
                array = _reshaped(array, (*first, count, columns))
            self.arrays[name] = array

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        of = self.pieces[name]
        if len(of) == 1:
            return self.source.read_box(of[0], box)
        *first, (low, high), columns = box
        out = np.empty(box_shape(box), self.arrays[name].dtype)
        start = 0
        for piece in of:
            stop = start + self.source.arrays[piece].shape[-2]
            begin, end = max(low, start), min(high, stop)
            if begin < end:
                rows = (begin - start, end - start)
                values = self.source.read_box(piece, (*first, rows, columns))
                out[..., begin - low : end - low, :] = values
            start = stop
        return out


class Described:
    """A source with another ``info`` and, where ``arrays`` are given, others' splits and
    attributes for arrays that it has; arrays that are not given are left out."""

    def __init__(
        self, source: Source, info: SourceInfo, arrays: Mapping[str, SourceArray] | None = None
    ) -> None:
        self.source, self.info = source, info
        self.arrays = source.arrays if arrays is None else dict(arrays)
        for name, array in self.arrays.items():
            found = source.arrays[name]
            same = (array.shape, array.logical_dtype) == (found.shape, found.logical_dtype)
            assert same, (name, array, found)

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        return self.source.read_box(name, box)
