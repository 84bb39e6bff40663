"""How two checkpoints differ, compared a few chunks at a time; their layouts may differ too."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ckpt.format import Array, Manifest, PackPlace, StoredTensor, to_float32
from ckpt.read.box import read_tensor
from ckpt.store import THREADS, Location, ReportBytes
from parallel.layout import Box, cell_box, cells, whole_box

BLOCK_BYTES = 16 << 20
"""Bytes of an array that a thread reads from each checkpoint and compares at a time."""


@dataclass(frozen=True)
class ArrayDifference:
    """How an array of one checkpoint differs from the array of that name in another.

    ``what`` is ``alike`` where all bits are equal, and ``numbers`` where some differ: the counts
    below say how many. Arrays of any other ``what`` were not read.
    """

    name: str
    what: Literal["alike", "only here", "only there", "shape", "dtype", "numbers"]
    detail: str = ""
    elements: int = 0
    differing: int = 0
    """Elements whose bits differ."""
    max_abs: float | None = None
    """The largest absolute difference of two finite numbers; None for bool arrays."""
    relative_l2: float | None = None
    """sqrt(sum((there - here)^2) / sum(here^2)) where both are finite; None where here is zero."""
    not_finite: int = 0
    """Elements that differ, and are NaN or infinite in at least one of the checkpoints."""


def compare(
    here: Location,
    manifest: Manifest,
    there: Location,
    other: Manifest,
    progress: ReportBytes = lambda _: None,
) -> list[ArrayDifference]:
    """Compare every array of two checkpoints, bit by bit; every byte read is verified.

    Args:
        here: the folder or store of the first checkpoint.
        manifest: the first checkpoint.
        there: the folder or store of the second checkpoint.
        other: the second checkpoint.
        progress: called with the bytes of the first checkpoint that were compared.

    Returns:
        One entry for each array name of either checkpoint, sorted by name.

    Raises:
        CheckpointError: where an object of either checkpoint is missing or damaged.
    """
    ours, theirs = manifest.tensors, other.tensors
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            found.append(ArrayDifference(name, "only there" if a is None else "only here"))
        elif a.shape != b.shape:
            found.append(ArrayDifference(name, "shape", f"{a.shape} and {b.shape}"))
        elif a.logical_dtype != b.logical_dtype:
            detail = f"{a.logical_dtype} and {b.logical_dtype}"
            found.append(ArrayDifference(name, "dtype", detail))
        else:

            def measure(box: Box, a: StoredTensor = a, b: StoredTensor = b) -> _Sums:
                x = read_tensor(here, manifest, a, box)
                y = read_tensor(there, other, b, box)
                progress(x.nbytes)
                return _Sums.of(x, y, a.logical_dtype)

            total = _Sums()
            with ThreadPoolExecutor(THREADS) as pool:
                for sums in pool.map(measure, _boxes(a, b)):
                    total += sums
            found.append(total.summary(name, math.prod(a.shape)))
    return found


def _boxes(a: StoredTensor, b: StoredTensor) -> Iterator[Box]:
    """Boxes that cover an array, of entire chunks of both checkpoints where these are small."""
    one, two = _chunk(a), _chunk(b)
    both = tuple(max(x, y) for x, y in zip(one, two, strict=True))
    step = list(both if _bytes(a, both) <= BLOCK_BYTES else one)
    for dim in reversed(range(len(step))):
        times = max(1, BLOCK_BYTES // max(1, _bytes(a, tuple(step))))
        step[dim] = max(1, min(a.shape[dim], step[dim] * times))
    for at in cells(whole_box(a.shape), tuple(step)):
        yield cell_box(at, tuple(step), a.shape)


def _chunk(tensor: StoredTensor) -> tuple[int, ...]:
    """What is read at once in any case; of a pack, what it has of a tensor."""
    return tensor.shape if isinstance(tensor, PackPlace) else tensor.chunk_shape


def _bytes(record: StoredTensor, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * record.dtype.itemsize


@dataclass(frozen=True)
class _Sums:
    differing: int = 0
    not_finite: int = 0
    max_abs: float = 0.0
    squares: float = 0.0
    squares_here: float = 0.0
    numeric: bool = True

    @classmethod
    def of(cls, x: Array, y: Array, logical_dtype: str) -> _Sums:
        bits = f"u{x.dtype.itemsize}"
        unlike = x.reshape(-1).view(bits) != y.reshape(-1).view(bits)
        count = int(np.count_nonzero(unlike))
        if logical_dtype == "bool":
            return cls(count, numeric=False)
        a, b = _float64(x, logical_dtype), _float64(y, logical_dtype)
        finite = np.isfinite(a) & np.isfinite(b)
        not_finite = int(np.count_nonzero(unlike & ~finite))
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        with np.errstate(over="ignore"):
            gaps = np.abs(b - a)
            return cls(
                count, not_finite, float(gaps.max(initial=0.0)), float(gaps @ gaps), float(a @ a)
            )

    def __add__(self, more: _Sums) -> _Sums:
        return _Sums(
            self.differing + more.differing,
            self.not_finite + more.not_finite,
            max(self.max_abs, more.max_abs),
            self.squares + more.squares,
            self.squares_here + more.squares_here,
            self.numeric and more.numeric,
        )

    def summary(self, name: str, elements: int) -> ArrayDifference:
        if not self.differing:
            return ArrayDifference(name, "alike", elements=elements)
        relative = None
        if self.numeric and self.squares_here and math.isfinite(self.squares):
            relative = math.sqrt(self.squares / self.squares_here)
        return ArrayDifference(
            name, "numbers", "", elements, self.differing,
            self.max_abs if self.numeric else None, relative, self.not_finite,
        )  # fmt: skip


def _float64(values: Array, logical_dtype: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    flat = values.reshape(-1)
    with np.errstate(invalid="ignore"):  # some NaNs signal
        if logical_dtype.startswith(("bfloat16", "float8")):
            flat = to_float32(flat, logical_dtype)
        return flat.astype(np.float64)
