"""Sums of floating-point numbers that have equal bits in any order and any nesting.

A floating-point sum depends on its order, and the order depends on the layout of ranks. Integers
have no such dependence. Gradients of one micro-batch are rounded to multiples of 2^-54 and summed
as 64-bit integers, by any collective. Squares for a norm are split into a few parts, each a
multiple of a power of two, whose float64 sums are exact (the reproducible sum of Demmel and Nguyen,
"Parallel Reproducible Summation", IEEE Transactions on Computers 64(7), 2015).

Every function here uses elementwise operations of one rounding each, so that no kernel chooses an
order. Legend: N numbers, R rows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

FRACTION_BITS = 54
"""Gradients are multiples of 2^-FRACTION_BITS."""
RANGE_BITS = 8
"""Sums of gradients are at most 2^RANGE_BITS in magnitude; 64 bits have room for twice that."""
_CHUNK = 1 << 14  # numbers whose intermediate results stay in a core's cache
_ROW_CHUNK = 1 << 17  # of squares, which take many small operations
_CHUNK_OF_DEVICES = 1 << 24  # enough for all of a GPU, with 0.2 GB of intermediate results

SQUARE_QUANTA = (2.0**-12, 2.0**-38, 2.0**-64, 2.0**-90)
"""The quanta of the parts of a sum of squares. 26 bits lie between two of them: sums of up to 2^27
rows are exact."""
_MAX_SQUARE = 2.0**40

_LOSS_QUANTUM = 2.0**-20


class UnitLimit:
    """Whether every number of every unit was small enough for exact sums.

    A unit is a micro-batch. A gradient of a unit may have numbers up to 2^RANGE_BITS / units: then
    no sum of the step's units leaves the 64 bits. Whether a unit is within the limit depends on the
    unit alone, and not on the layout.

    Args:
        units: the most micro-batches of one step, over all ranks.
    """

    def __init__(self, units: int) -> None:
        if units < 1:
            raise ValueError(f"units ({units}) must be at least 1")
        self.largest = 2.0 ** (RANGE_BITS - (units - 1).bit_length())
        """The largest magnitude of a unit's numbers."""
        self._seen: Tensor | None = None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None, "_seen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    def look(self, chunk_N: Tensor) -> None:
        """Take note of some numbers of a unit; no copy to the host. Threads may call."""
        if chunk_N.numel():
            low, high = torch.aminmax(chunk_N)
            seen = torch.maximum(high, -low).float()  # NaN where there is one
            with self._lock:
                self._seen = seen if self._seen is None else torch.maximum(self._seen, seen)

    def take(self) -> bool:
        """Whether all numbers since the last call were finite and within the limit."""
        seen, self._seen = self._seen, None
        return seen is None or bool(seen <= self.largest)


def add_unit(total_N: Tensor, grad_N: Tensor, limit: UnitLimit) -> None:
    """``total`` += a unit's gradient, rounded to multiples of 2^-FRACTION_BITS.

    Args:
        total_N: contiguous int64, of the gradient's number of elements; changed in place.
        grad_N: float32, bfloat16, float16 or float64, of any shape.
        limit: gets to see the gradient.
    """
    flat_N = grad_N.reshape(-1)
    size = min(len(flat_N), chunk_length(flat_N.device))
    scaled_N = flat_N.new_empty(size, dtype=torch.promote_types(flat_N.dtype, torch.float32))
    fixed_N = total_N.new_empty(size)
    for chunk, into in _chunks(flat_N, total_N.view(-1)):
        limit.look(chunk)
        scaled, fixed = scaled_N[: len(chunk)], fixed_N[: len(chunk)]
        wide = chunk if chunk.dtype == scaled.dtype else scaled.copy_(chunk)
        # The product is exact, and an integer of at most 24 bits is a float32 number.
        torch.mul(wide, 2.0**FRACTION_BITS, out=scaled).round_()
        into.add_(fixed.copy_(scaled))


def to_fixed_(grad_N: Tensor, limit: UnitLimit) -> Tensor:
    """A contiguous float64 tensor's numbers as multiples of 2^-FRACTION_BITS; int64 in the same
    memory, which is the result."""
    fixed_N = grad_N.view(torch.int64)
    scaled_N = grad_N.new_empty(min(grad_N.numel(), chunk_length(grad_N.device)))
    for chunk, into in _chunks(grad_N.view(-1), fixed_N.view(-1)):
        limit.look(chunk)
        into.copy_(torch.mul(chunk, 2.0**FRACTION_BITS, out=scaled_N[: len(chunk)]).round_())
    return fixed_N


def from_fixed(total_N: Tensor, out_N: Tensor) -> None:
    """Write a sum of :func:`add_unit` or :func:`to_fixed_` into ``out``, a contiguous floating
    tensor, which may have the same memory."""
    size = min(total_N.numel(), chunk_length(total_N.device))
    double_N = total_N.new_empty(size, dtype=torch.float64)
    for chunk, into in _chunks(total_N.view(-1), out_N.view(-1)):
        # The conversion rounds to the nearest number, as IEEE 754 has it; the product is exact.
        into.copy_(double_N[: len(chunk)].copy_(chunk).mul_(2.0**-FRACTION_BITS))


def chunk_length(device: torch.device, on_host: int = _CHUNK) -> int:
    """How many numbers an elementwise operation takes at once; no bit depends on this length."""
    return on_host if device.type == "cpu" else _CHUNK_OF_DEVICES


def _chunks(a_N: Tensor, b_N: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    size = chunk_length(a_N.device)
    return zip(a_N.split(size), b_N.split(size), strict=True)


def row_square_sums(x: Tensor) -> Tensor:
    """float64 [R]: the sum of squares of each row; a row is what the last dim has, and of a vector
    each number.

    The sum of a row does not depend on how many rows there are.
    """
    x_RN = x.reshape(-1, x.shape[-1] if x.ndim > 1 else 1)
    if not x_RN.numel():
        return x_RN.new_zeros(len(x_RN), dtype=torch.float64)
    per_chunk = max(chunk_length(x.device, _ROW_CHUNK) // x_RN.shape[1], 1)
    return torch.cat([_tree_sum(chunk.double().square_()) for chunk in x_RN.split(per_chunk)])


def _tree_sum(x_RN: Tensor) -> Tensor:
    """[R]: the second half of the columns is added to the first until one is left."""
    while (columns := x_RN.shape[1]) > 1:
        half = (columns + 1) // 2
        halves = x_RN[:, :half]
        halves[:, : columns - half].add_(x_RN[:, half:])
        x_RN = halves
    return x_RN[:, 0].clone()


def square_parts(squares_R: Tensor) -> Tensor:
    """float64 [4]: the sum of non-negative numbers, in parts that are multiples of SQUARE_QUANTA.

    Sums of such parts over ranks are exact in any order; :func:`from_parts` adds the parts up. NaN
    where a number is not finite, or too large.
    """
    rest_R, parts = squares_R.double(), []
    bad = ~(squares_R.max() <= _MAX_SQUARE) if len(squares_R) else None
    for quantum in SQUARE_QUANTA:
        part_R = (rest_R / quantum).round_() * quantum
        rest_R = rest_R - part_R
        parts.append(part_R.sum())
    out = torch.stack(parts)
    return out if bad is None else out.masked_fill(bad, torch.nan)


def from_parts(parts: Tensor) -> Tensor:
    """The sum of the parts of :func:`square_parts`, a float64 scalar, the smallest part first; NaN
    where the sum is too large to be exact."""
    total = parts[3] + parts[2] + parts[1] + parts[0]
    return total.masked_fill(~(total <= _MAX_SQUARE), torch.nan)


def on_loss_grid(loss: Tensor) -> Tensor:
    """A summed loss in nats as a float64 multiple of 2^-20: sums up to 2^33 nats are exact in any
    order. A float32 loss of 8 nats or more is such a multiple already."""
    return (loss.double() / _LOSS_QUANTUM).round_() * _LOSS_QUANTUM
