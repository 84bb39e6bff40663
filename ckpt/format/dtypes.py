"""Dtypes of stored arrays: how each is stored, and conversions between floats.

numpy has no bfloat16 and no float8; ml_dtypes decodes both, and rounds to bfloat16. One cast stays
here: ml_dtypes (0.6) rounds float64 to bfloat16 twice, by way of float32, and then misses the
nearest bfloat16 of numbers next to a tie.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Values = np.ndarray[Any, Any]

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtypes that :func:`convert` takes."""
_BLOCK = 1 << 18


def to_float32(values: Values, logical_dtype: str) -> Values:
    """Stored numbers as float32: float64 and 64-bit integers are rounded, all others are exact."""
    return _numbers(values, logical_dtype).astype(np.float32)


def convert(values: Values, before: str, after: str) -> Values:
    """Convert stored floats of dtype ``before`` to ``after``, both of :data:`FLOATS`.

    Rounded once, to nearest with ties to even; beyond the range of ``after`` is infinity, and a NaN
    stays a NaN.
    """
    if before == after:
        return values
    out = np.empty(values.shape, STORAGE_DTYPES[after])
    flat, result = np.ascontiguousarray(values).reshape(-1), _numbers(out.reshape(-1), after)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for at in range(0, flat.size, _BLOCK):  # temporary arrays of a block, not of all values
            block = _numbers(flat[at : at + _BLOCK], before)
            if (before, after) == ("float64", "bfloat16"):
                block = _to_odd_float32(block)
            result[at : at + _BLOCK] = block.astype(result.dtype)
    return out


def _numbers(values: Values, logical_dtype: str) -> Values:
    """A view of stored numbers in a dtype that numpy can compute with."""
    return values.view(_EXTENDED.get(logical_dtype, values.dtype))


def _to_odd_float32(values: Values) -> Values:
    """float64 rounded to odd: rounding the result again to a narrower float gives the same number
    as rounding ``values`` once (Boldo and Melquiond, 2008)."""
    near = values.astype(np.float32)
    inexact = near.astype(np.float64) != values
    even = (near.view(np.uint32) & np.uint32(1)) == 0
    towards = np.where(near.astype(np.float64) < values, np.inf, -np.inf).astype(np.float32)
    return np.where(inexact & even & ~np.isnan(values), np.nextafter(near, towards), near)


_EXTENDED = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2")
}
STORAGE_DTYPES = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint64": "uint64",
    "uint32": "uint32",
    "uint16": "uint16",
    "uint8": "uint8",
    "bool": "bool",
}
"""How a logical dtype is stored. zarr has no bfloat16 and no float8: these are bit patterns."""
