"""Speed of a device: the rate of a product of matrices, over windows of a fixed time."""

from __future__ import annotations

import os
import time

import torch

_WINDOWS = 5
"""The best window counts: another process of the machine may disturb some of them."""
_WINDOW_SECONDS = 0.2
"""Longer than the time slices of a scheduler, so that a rank that often stands still is slow."""


def product_shape(device: torch.device) -> tuple[int, torch.dtype]:
    """Rows, and columns, of each matrix of the product, and their dtype."""
    return (512, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)


def product_rate(device: torch.device) -> float:
    """FLOP/s of C = A B: bfloat16 [8192, 8192] on an accelerator, float32 [512, 512] on a CPU."""
    size, dtype = product_shape(device)
    a = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)
    best = 0.0
    for _ in range(_WINDOWS):
        synchronize(device)
        began, products = time.perf_counter(), 0
        while time.perf_counter() - began < _WINDOW_SECONDS:
            for _ in range(2 if device.type == "cpu" else 10):
                torch.mm(a, a, out=out)
                products += 1
            synchronize(device)
        best = max(best, products * 2 * size**3 / (time.perf_counter() - began))
    return best


def synchronize(device: torch.device) -> None:
    """Wait until an accelerator has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def turns(local_ranks: int, device: torch.device) -> int:
    """In how many turns the ranks of a node measure: ranks on a CPU must not share its cores."""
    if device.type != "cpu":
        return 1
    at_once = max(1, len(os.sched_getaffinity(0)) // torch.get_num_threads())
    return -(-local_ranks // at_once)
