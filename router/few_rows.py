"""Functions of rows that give a row equal bits in any number of rows, on a CPU.

A matrix library has kernels of their own for matrices of few rows, which add in another order. MKL
has them for 1 to 3 rows in float32 and for 1 to 5 in bfloat16; of 16 rows and more, each row's bits
were equal in all sizes that were tried. And PyTorch computes functions of single numbers, as an
exponential, in vectors of 16 numbers, two at a time; what is left behind the last ones has other
instructions, and other bits. So a function of few rows is computed with zeros below.

Legend: n rows, D and F sizes of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from router.config import LEAST_ROWS


def padded_rows(x_nD: Tensor) -> Tensor:
    """``x_nD`` with zeros below, on a CPU to a multiple of :data:`LEAST_ROWS` rows."""
    missing = -x_nD.shape[0] % LEAST_ROWS if x_nD.device.type == "cpu" else 0
    return F.pad(x_nD, (0, 0, 0, missing)) if missing else x_nD


def with_enough_rows(
    function: Callable[[Tensor], Tensor], x_nD: Tensor, *, whole_vectors: bool = False
) -> Tensor:
    """[n, D] -> [n, F], ``function`` of ``x_nD``, which computes each row by itself.

    On a CPU the function sees at least :data:`LEAST_ROWS` rows, or with ``whole_vectors``, for a
    function of single numbers, a multiple of them. No rows stay no rows.
    """
    n = x_nD.shape[0]
    if x_nD.device.type != "cpu" or torch.compiler.is_compiling() or n == 0:
        return function(x_nD)
    if x_nD.numel() % LEAST_ROWS == 0 if whole_vectors else n >= LEAST_ROWS:
        return function(x_nD)
    # A copy: FSDP warns of modules whose outputs are views.
    return function(padded_rows(x_nD))[:n].clone()
