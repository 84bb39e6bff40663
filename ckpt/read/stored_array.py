"""A checkpoint as a mapping of arrays; indexing an array reads and verifies its chunks.

Neither torch nor the model's code is needed: ``ckpt.open(path)["model/embed/weight"][:3]``.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ckpt.format import Manifest, StoredTensor, locate, read_manifest, to_float32
from ckpt.read.box import read_tensor
from ckpt.store import Location, Store, open_store

Index = Any
"""Ints, slices, an ellipsis, or a tuple of them: numpy's basic indexing."""


class StoredArray:
    """One array of a checkpoint. Indexing reads the chunks that the index touches, and no others.

    ``array[3, 17]`` gives the stored numbers: bfloat16 and float8 are bit patterns of dtype uint16
    and uint8, and ``logical_dtype`` has the name of the float. ``array.float32[3, 17]`` gives
    float32.
    """

    def __init__(self, root: Store, manifest: Manifest, record: StoredTensor) -> None:
        self._root, self._manifest, self._record = root, manifest, record
        self.name, self.shape = record.name, record.shape
        self.dtype, self.logical_dtype = record.dtype, record.logical_dtype
        self.attributes = record.attributes

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self.name} is a scalar: it has no length")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<StoredArray {self.name} {self.logical_dtype} {self.shape}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError(f"{self.name} is on disk: copy=False is not possible")
        return np.asarray(self[...], dtype)

    def __getitem__(self, index: Index) -> np.ndarray[Any, Any]:
        """The stored numbers at an index; a scalar is an array without dims.

        Raises IndexError for an index out of range or with too many dims, TypeError for an index
        that is neither an int nor a slice, and CheckpointError, naming the object, where an object
        is missing, short or damaged.
        """
        picks = _expand(index, self.shape, self.name)
        box: list[tuple[int, int]] = []
        finish: list[int | slice] = []
        for pick, size in zip(picks, self.shape, strict=True):
            if isinstance(pick, int):
                box.append((pick, pick + 1))
                finish.append(0)
                continue
            steps = range(*pick.indices(size))
            low, high = (min(steps[0], steps[-1]), max(steps[0], steps[-1])) if steps else (0, -1)
            box.append((low, high + 1))
            finish.append(slice(None, None, steps.step))
        values = read_tensor(self._root, self._manifest, self._record, tuple(box))
        return np.asarray(values[tuple(finish)])

    @property
    def float32(self) -> Floats:
        """A view of this array whose numbers are converted to float32 when they are read."""
        return Floats(self)


class Floats:
    """A :class:`StoredArray` whose numbers are converted to float32."""

    def __init__(self, array: StoredArray) -> None:
        self.array = array

    def __getitem__(self, index: Index) -> np.ndarray[Any, Any]:
        """The numbers at an index as float32; float64 and large integers are rounded."""
        return to_float32(self.array[index], self.array.logical_dtype)


def _expand(index: Index, shape: tuple[int, ...], name: str) -> list[int | slice]:
    """For every dim a slice, or an int that is not negative."""
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, part in enumerate(given) if part is Ellipsis]
    if len(dots) > 1:
        raise IndexError(f"{name}: an index has at most one ellipsis")
    if len(given) - len(dots) > len(shape):
        raise IndexError(f"{name} has {len(shape)} dims, the index {len(given) - len(dots)}")
    at = dots[0] if dots else len(given)
    rest = [slice(None)] * (len(shape) - len(given) + len(dots))
    picks: list[int | slice] = []
    for part, size in zip([*given[:at], *rest, *given[at + 1 :]], shape, strict=True):
        if isinstance(part, slice):
            picks.append(part)
            continue
        if isinstance(part, bool | np.bool_):
            raise TypeError(f"{name}: an index is made of ints and slices, not of {part}")
        try:
            number = operator.index(part)
        except TypeError:
            raise TypeError(f"{name}: an index is made of ints and slices, not of {part}") from None
        if not -size <= number < size:
            raise IndexError(f"{name}: index {number} is out of range for a dim of {size}")
        picks.append(number % size)
    return picks


class OpenCheckpoint(Mapping[str, StoredArray]):
    """The arrays of one checkpoint by name, and its ``manifest``."""

    def __init__(self, root: Store, manifest: Manifest) -> None:
        self.root, self.manifest = root, manifest
        self._records = manifest.tensors

    def __getitem__(self, name: str) -> StoredArray:
        """Raises KeyError, with the names that are nearest, where there is no such array."""
        record = self._records.get(name)
        if record is None:
            near = difflib.get_close_matches(str(name), self._records) or list(self._records)[:3]
            raise KeyError(
                f"{name} is no array of step {self.manifest.step} in {self.root.where()}; there is "
                f"{', '.join(near) or 'none'}"
            )
        return StoredArray(self.root, self.manifest, record)

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __repr__(self) -> str:
        return f"<OpenCheckpoint {self.root.where()} step {self.manifest.step}, {len(self)} arrays>"


def open_checkpoint(root: Location, step: int | None = None) -> OpenCheckpoint:
    """Open the checkpoint of ``step``, or the newest one.

    ``root`` may also be the path of a manifest, which names its step.

    Raises CheckpointError where there is no such checkpoint, or its manifest is damaged.
    """
    root, step = locate(root, step)
    store = open_store(root)
    return OpenCheckpoint(store, read_manifest(store, step))


open = open_checkpoint  # noqa: A001  # ``ckpt.open``, as users write
