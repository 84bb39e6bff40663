"""What MegaBlocks 0.10.0 compiles with CUDA (its ``csrc``), on a CPU, with the checks that it has.

Only what the grouped, dropless layer calls: ``sort.h``, ``histogram.h``, ``cumsum.h`` and the
forward of ``replicate.h``.
"""

import torch
from torch import Tensor

_INTEGERS = (torch.int16, torch.int32, torch.int64)


def _check(held: bool, what: str) -> None:
    if not held:
        raise RuntimeError(f"megablocks_ops: {what}")


def sort(x: Tensor, end_bit: int, x_out: Tensor, iota_out: Tensor) -> None:
    """By the lowest ``end_bit`` bits alone, and stable, as a radix sort is."""
    for tensor in (x, x_out, iota_out):
        _check(tensor.ndim == 1 and tensor.dtype == x.dtype, "one-dimensional, of one dtype")
        _check(tensor.is_contiguous(), "read and written by their addresses")
    _check(x.dtype in _INTEGERS, "integers")
    order = torch.argsort(x & ((1 << end_bit) - 1), stable=True)
    x_out.copy_(x[order])
    iota_out.copy_(order)


def histogram(x: Tensor, num_bins: int) -> Tensor:
    """[n] or [b, n] -> [num_bins] or [b, num_bins] int32."""
    _check(x.ndim in (1, 2) and x.dtype in _INTEGERS, "one- or two-dimensional integers")
    _check(x.is_contiguous(), "read by its address")
    rows = (x if x.ndim == 2 else x.unsqueeze(0)).long()
    counts = torch.stack([row.bincount(minlength=num_bins)[:num_bins] for row in rows]).int()
    return counts.view(*x.shape[:-1], num_bins)


def _check_sums(x: Tensor, dim: int, out: Tensor) -> None:
    _check(x.ndim == out.ndim == 2 and dim == 1, "two-dimensional, along the last dim")
    _check(x.dtype in _INTEGERS and out.dtype == x.dtype, "integers of one dtype")


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    _check_sums(x, dim, out)
    out.copy_(x.cumsum(1))


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    _check_sums(x, dim, out)
    out.copy_(x.cumsum(1) - x)


def replicate_forward(x: Tensor, bins: Tensor, out: Tensor) -> None:
    """x [b, n] -> out [b, bins[-1]]: ``x[:, i]`` up to place ``bins[i]``."""
    _check(x.dtype in (torch.float16, torch.int16, torch.int32), "float16, int16 or int32")
    _check(x.ndim == out.ndim == 2 and out.dtype == x.dtype, "two-dimensional, of one dtype")
    _check(bins.ndim == 1 and bins.dtype == torch.int32 and len(bins) == x.shape[1], "int32 bins")
    sizes = torch.diff(bins.long(), prepend=bins.new_zeros(1))
    out.copy_(x.repeat_interleave(sizes, dim=1))
