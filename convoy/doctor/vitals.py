"""The numbers of one matrix by which checks judge it.

Legend: D the rows that a matrix takes or gives in the model's width, F those of an expert's hidden
units; a matrix here is [in, out].
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Values = np.ndarray[Any, Any]
_SAMPLE = 4096
_BF16_LOW = np.uint32(0xFFFF)


@dataclass(frozen=True)
class Vitals:
    """Of one matrix or vector, all that is kept of it."""

    shape: tuple[int, ...]
    dtype: str
    """As it is stored."""
    digest: bytes
    """Of its numbers."""
    not_finite: int
    zeros: int
    constant: bool
    """Whether all numbers are one."""
    mean_square: float
    kurtosis: float
    """The fourth moment by the square of the second, 3 for normal numbers and 1.8 for uniform."""
    ins: Values
    """Mean squares over the outs, [in]."""
    outs: Values
    """Mean squares over the ins, [out]."""
    log_ins: Values
    """Means over the outs of the logarithms of the numbers' sizes, [in]."""
    sample: Values
    """Up to 4,096 of the numbers, at equal distances."""
    turned_sample: Values | None
    """Of a square matrix, the same places of its transpose."""
    of_bfloat16: bool
    """Whether every number is one of bfloat16."""
    zero_ins: frozenset[int]
    zero_outs: frozenset[int]
    tail: int
    """How many zeros are at the end, as it is stored."""

    @property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    @property
    def dead(self) -> bool:
        """Whether every number is zero."""
        return self.zeros == self.size


def examine(values: Values, dtype: str, *, turned: bool = False) -> Vitals:
    """The vitals of float32 numbers.

    Args:
        values: [in, out], or [n].
        dtype: in which they are stored.
        turned: whether they are stored as [out, in].
    """
    matrix = values if values.ndim == 2 else values.reshape(-1, 1)
    stored = matrix.T if turned else matrix
    with np.errstate(all="ignore"):
        squares = np.square(matrix, dtype=np.float64 if matrix.size < 1 << 16 else np.float32)
        ins, outs = squares.mean(1, dtype=np.float64), squares.mean(0, dtype=np.float64)
        mean_square = float(ins.mean()) if ins.size else 0.0
        log_ins = np.log(np.maximum(np.abs(matrix), 1e-38)).mean(1, dtype=np.float64)
        fourth = float(np.mean(np.square(squares), dtype=np.float64)) if matrix.size else 0.0
    flat = matrix.reshape(-1)
    places = np.arange(0, flat.size, max(1, flat.size // _SAMPLE))[:_SAMPLE]
    square = values.ndim == 2 and values.shape[0] == values.shape[1]
    order = np.ascontiguousarray(stored).reshape(-1)
    nonzero = np.flatnonzero(order)
    bits = np.ascontiguousarray(flat).view(np.uint32)
    return Vitals(
        shape=values.shape,
        dtype=dtype,
        digest=hashlib.blake2b(np.ascontiguousarray(flat).data, digest_size=12).digest(),
        not_finite=int(matrix.size - np.isfinite(flat).sum()),
        zeros=int(flat.size - nonzero.size),
        constant=bool(flat.size and (flat == flat[0]).all()),
        mean_square=mean_square,
        kurtosis=fourth / mean_square**2 if mean_square > 0 else 0.0,
        ins=ins,
        outs=outs,
        log_ins=log_ins,
        sample=flat[places].copy(),
        turned_sample=values.T.reshape(-1)[places].copy() if square else None,
        of_bfloat16=not (bits & _BF16_LOW).any(),
        zero_ins=frozenset(np.flatnonzero(ins == 0).tolist()),
        zero_outs=frozenset(np.flatnonzero(outs == 0).tolist()),
        tail=int(order.size - 1 - nonzero[-1]) if nonzero.size else order.size,
    )


def spread(vitals: Vitals) -> float:
    """How unequal the rows and columns of a matrix are, in standard deviations.

    The mean squares of rows of independent numbers of one distribution with the kurtosis k differ
    by the variance (k - 1) / n of n numbers. Their sum of squares is then nearly chi-squared. About
    0 for a matrix at random initial values, large for a trained one.
    """
    if vitals.mean_square <= 0 or len(vitals.shape) != 2 or min(vitals.shape) < 2:
        return 0.0
    kurtosis = min(max(vitals.kurtosis, 1.2), 3.0)
    score = 0.0
    for profile, length in ((vitals.ins, vitals.shape[1]), (vitals.outs, vitals.shape[0])):
        relative = profile / vitals.mean_square - 1.0
        chi = float((relative**2).sum()) * length / (kurtosis - 1.0)
        free = profile.size - 1
        score += (chi - free) / math.sqrt(2.0 * free)
    return score / math.sqrt(2.0)


def kinship(rows: Values) -> float:
    """How much the rows of a matrix [E, D] point along one another, in standard deviations.

    The squared cosines of independent rows are 1 / D on average, and D times their sum is nearly
    chi-squared. About 0 for a router at random initial values, large for a trained one.
    """
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(1, keepdims=True))
    if len(rows) < 3 or not (lengths > 0).all() or not np.isfinite(lengths).all():
        return 0.0
    unit = rows / lengths
    pairs = np.triu_indices(len(rows), 1)
    chi = float(np.square((unit @ unit.T)[pairs]).sum()) * rows.shape[1]
    return float((chi - pairs[0].size) / math.sqrt(2.0 * pairs[0].size))


def correlation(a: Values, b: Values) -> float:
    """Pearson's; 0 where either is constant or not finite."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x * x).sum() * (y * y).sum()))
    value = float((x * y).sum()) / norm if norm > 0 else 0.0
    return value if math.isfinite(value) else 0.0


def ranks(values: Values) -> Values:
    """The rank of each number, for Spearman's correlation."""
    return np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64)


def fisher(a: Values, b: Values) -> float:
    """Spearman's correlation of two profiles in standard deviations from none (Fisher's z; the
    factor 1.06 is that of Fieller, Hartley and Pearson, 1957)."""
    if a.size < 8 or a.size != b.size:
        return 0.0
    if a.min() == a.max() or b.min() == b.max():
        return 0.0
    rho = max(-0.999, min(0.999, correlation(ranks(a), ranks(b))))
    return math.atanh(rho) * math.sqrt((a.size - 3) / 1.06)
