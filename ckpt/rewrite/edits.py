"""Sources that change what another source yields: selections, dtypes and descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt.format import (
    FLOATS,
    convert,
)
from ckpt.rewrite.source import Source, SourceInfo, changed
from parallel.layout import Box


class Selected:
    """Some arrays of a source, under other names: ``names`` has the source's, by the new one."""

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
        source: the rest of it stays as it is.
        names: of the arrays; those that are no floats of 16 bits or more stay as they are.
        dtype: the logical dtype that they get.
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


class Described:
    """A source whose ``info`` is another."""

    def __init__(self, source: Source, info: SourceInfo) -> None:
        self.source, self.info, self.arrays = source, info, source.arrays

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        return self.source.read_box(name, box)
