"""Which path is chosen, on devices that this machine may not have."""

from __future__ import annotations

import pytest
import torch

from moe import choose_backend


@pytest.mark.parametrize(
    ("backend", "sizes", "dtype", "device", "expected"),
    [
        ("auto", (16, 24), torch.float32, "cpu", "packed"),
        ("auto", (16, 24), torch.bfloat16, "cuda", "grouped_mm"),
        ("auto", (16, 24), torch.float32, "cuda", "loop"),
        ("auto", (16, 24), torch.float64, "cpu", "packed"),
        ("auto", (18, 24), torch.float32, "cpu", "packed"),
        ("packed", (18, 7), torch.float32, "cpu", "packed"),
        ("auto", (16, 24), torch.bfloat16, "cpu", "grouped_mm"),
        ("auto", (16, 24), torch.bfloat16, "mps", "loop"),
        ("auto", (16, 20), torch.bfloat16, "cpu", "loop"),
        ("loop", (16, 24), torch.float32, "cpu", "loop"),
        ("grouped_mm", (16, 24), torch.float32, "cpu", "grouped_mm"),
    ],
)
def test_the_path_follows_from_shapes_dtype_and_device(backend, sizes, dtype, device, expected):
    assert choose_backend(backend, *sizes, dtype, device) == expected


def test_a_path_that_was_asked_for_and_cannot_run_is_refused():
    with pytest.raises(ValueError, match=r"a dtype that it takes on cuda \(torch.bfloat16\)"):
        choose_backend("grouped_mm", 16, 24, torch.float32, "cuda")
    with pytest.raises(ValueError, match=r"moe.backend \(packed\) must have float32 or float64"):
        choose_backend("packed", 16, 24, torch.bfloat16, "cpu")
    with pytest.raises(ValueError, match=r"multiples of 2 for torch.float64"):
        choose_backend("grouped_mm", 16, 24, torch.float64, "cpu")
