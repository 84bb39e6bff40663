"""The peak rate of a rank's device."""

from __future__ import annotations

import time

import torch

_TFLOPS = {
    # Dense, without sparsity, of the data sheets; float32 on its own units, without TF32.
    "H200": {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0},
    "H100": {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0},
    "H800": {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0},
    "B200": {torch.bfloat16: 2250.0, torch.float16: 2250.0, torch.float32: 75.0},
    "A100": {torch.bfloat16: 312.0, torch.float16: 312.0, torch.float32: 19.5},
}
_LONG_ENOUGH = 0.02
"""A GEMM that takes so many seconds is large enough to measure the peak with."""


def peak_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """The peak rate of one rank's device, in floating-point operations per second.

    For the GPUs in ``_TFLOPS`` the rate is that of the data sheet. For other devices the rate is
    measured: the fastest of a few GEMMs with this process's threads.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, by_dtype in _TFLOPS.items():
            if known in name and dtype in by_dtype:
                return by_dtype[dtype] * 1e12
    size, largest = 128, 1024 if device.type == "cpu" else 8192
    while (seconds := _product_seconds(size, device, dtype)) < _LONG_ENOUGH and size < largest:
        size *= 2
    return 2 * size**3 / seconds


def _product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Ones, not random numbers: a resumed run has restored its random state by now.
    a = torch.ones(size, size, device=device, dtype=dtype)
    out, best = torch.empty_like(a), float("inf")
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
