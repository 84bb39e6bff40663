"""Floats that numpy has not, bfloat16 and float8: what their bits are, and rounding to them."""

from __future__ import annotations

from typing import Any

import numpy as np

Values = np.ndarray[Any, Any]

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Those that are converted into each other."""
_BLOCK = 1 << 18


def to_float32(values: Values, logical_dtype: str) -> Values:
    """Stored numbers as float32: exact but for float64 and int64, which are rounded."""
    if logical_dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if logical_dtype == "float8_e5m2":  # the first byte of a float16
        return (values.astype(np.uint16) << np.uint16(8)).view(np.float16).astype(np.float32)
    if logical_dtype == "float8_e4m3fn":
        return _E4M3[values]
    return values.astype(np.float32)


def _e4m3() -> Values:
    """Every number of float8_e4m3fn: no infinities, and one NaN of each sign (OCP OFP8, 2023)."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    magnitude[bits & 127 == 127] = np.nan
    return np.copysign(magnitude, np.where(bits < 128, 1.0, -1.0)).astype(np.float32)


_E4M3 = _e4m3()


def convert(values: Values, before: str, after: str) -> Values:
    """Stored floats in another dtype of :data:`FLOATS`, to nearest, ties to even; NaNs stay NaN."""
    if before == after:
        return values
    out = np.empty(values.shape, STORAGE_DTYPES[after])
    flat, result = np.ascontiguousarray(values).reshape(-1), out.reshape(-1)
    for at in range(0, flat.size, _BLOCK):  # a few temporaries of a block, not of everything
        block = flat[at : at + _BLOCK]
        if after == "bfloat16":
            result[at : at + _BLOCK] = _to_bfloat16(block, before)
        else:
            wide = to_float32(block, before) if before == "bfloat16" else block
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                result[at : at + _BLOCK] = wide.astype(out.dtype)
    return out


def _to_bfloat16(values: Values, before: str) -> Values:
    if before == "float64":
        values = _to_odd_float32(values)
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    rounded = (bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
    # Rounding could carry a NaN over into a zero; the quiet bit keeps it one.
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, upper | np.uint32(0x40), rounded).astype(np.uint16)


def _to_odd_float32(values: Values) -> Values:
    """Rounded to odd, so that a second rounding is as good as one (Boldo, Melquiond 2008)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        near = values.astype(np.float32)
        inexact = near.astype(np.float64) != values
        even = (near.view(np.uint32) & np.uint32(1)) == 0
        towards = np.where(near.astype(np.float64) < values, np.inf, -np.inf).astype(np.float32)
        return np.where(inexact & even & ~np.isnan(values), np.nextafter(near, towards), near)


# How a logical dtype is stored. zarr has no bfloat16 or float8: they are kept as bit patterns.
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
    "uint8": "uint8",
    "bool": "bool",
}
