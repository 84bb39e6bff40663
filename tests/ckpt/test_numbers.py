"""Floats that numpy has not: held to torch's, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ckpt.format.dtypes import STORAGE_DTYPES, convert, to_float32
from tests.support.checkpoints import bits


@pytest.mark.parametrize("before", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("after", ["float64", "float32", "float16", "bfloat16"])
def test_floats_are_rounded_to_nearest_even_and_nan_stays_nan(before, after):
    size = np.dtype(STORAGE_DTYPES[before]).itemsize
    raw = np.random.default_rng(0).integers(0, 256, 1 << 18, np.uint8)
    values = raw.view(STORAGE_DTYPES[before])
    if before == "float64":  # most of them are far out of reach of the others
        near = np.random.default_rng(1).standard_normal(1 << 14)
        # Half way between two bfloat16, and a bit that float32 does not see beside it.
        ties = (1 + (2 * np.arange(128) + 1) / 256)[:, None] * np.array([1, 1 + 2**-40, 1 - 2**-40])
        values = np.concatenate([values, near, ties.reshape(-1), [3.3895e38, -3.4028e38]])
    dtype, wanted = getattr(torch, before), getattr(torch, after)
    tensor = torch.from_numpy(values.copy()).view(dtype) if size == 2 else torch.from_numpy(values)
    made = torch.from_numpy(convert(values, before, after)).view(wanted)
    if (before, after) == ("float64", "bfloat16"):
        # torch rounds twice here; the nearest of three candidates is right by definition.
        close = tensor.to(torch.float32).to(torch.bfloat16)
        finite = torch.isfinite(close)
        up, down = (
            torch.nextafter(close, torch.full_like(close, s)) for s in (torch.inf, -torch.inf)
        )
        error = (made.double() - tensor).abs()
        for other in (close, up, down):
            better = (other.double() - tensor).abs() < error
            assert not (better & finite).any()
        assert torch.equal(torch.isnan(made), torch.isnan(tensor))
        return
    expected = tensor.to(wanted)
    nan = torch.isnan(expected)
    assert torch.equal(torch.isnan(made), nan)
    assert torch.equal(bits(made)[~nan], bits(expected)[~nan])


@pytest.mark.parametrize("dtype", sorted(STORAGE_DTYPES))
def test_stored_bits_are_the_numbers_that_torch_reads(dtype):
    size = np.dtype(STORAGE_DTYPES[dtype]).itemsize
    raw = np.arange(256 if size == 1 else 1 << 16, dtype=f"u{min(size, 2)}")
    if dtype == "bool":
        raw = raw % 2
    values = raw.astype(np.uint8).view(np.bool_) if dtype == "bool" else (
        raw.view(STORAGE_DTYPES[dtype]) if size <= 2 else raw.astype(STORAGE_DTYPES[dtype])
    )  # fmt: skip
    expected = torch.from_numpy(values.copy()).view(getattr(torch, dtype)).to(torch.float32)
    found = to_float32(values, dtype)
    assert np.array_equal(found, expected.numpy(), equal_nan=True)
    nan = np.isnan(found)
    assert np.array_equal(np.signbit(found)[~nan], torch.signbit(expected).numpy()[~nan])
