"""Rows that travel to experts in float8: a byte for each number, and one for each 128 of a row.

The scales are powers of two, rounded up, as DeepSeek-V3's of rows that are dispatched (arXiv
2412.19437, sections 3.3.3 and 3.5). A number of float8 times a power of two is a number of bfloat16
and of float32: what is unpacked is exact, and packing it again loses nothing.

Legend: T tokens, N rows, D d_model, P pieces of 128 of D.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe import kernels
from moe.float8.linear import TILE

_BIAS = 127
_LEAST, _MOST = -100, 120
"""The exponents of scales."""
_NOT_FINITE = 255
"""The exponent of a tile with a NaN or an infinity: all of it arrives as NaN."""


class Float8Rows:
    """How rows are written for a transfer, see :class:`parallel.comm.collectives.Wire`."""

    def pack(self, x_ND: Tensor) -> Tensor:
        """[N, D] -> [N, D + P] bytes: numbers of float8, then exponents with a bias of 127."""
        if kernels.available(x_ND.device.type) and x_ND.dtype in kernels.DTYPES:
            return kernels.pack_rows(x_ND)
        N, D = x_ND.shape
        x_NPt = F.pad(x_ND.float(), (0, -D % TILE)).view(N, -(-D // TILE), TILE)
        amax_NP = x_NPt.abs().amax(2)
        # The least e with amax <= 448 · 2^e, as 448 is 0.875 · 2^9. Without a division: on CUDA
        # torch multiplies by 1 / 448, which is rounded. frexp takes no zero here.
        mantissa, exponent = torch.frexp(amax_NP.clamp_min(2.0**_LEAST))
        exponent = (exponent - 9 + (mantissa > 0.875).int()).clamp(_LEAST, _MOST)
        values = torch.ldexp(x_NPt, -exponent.unsqueeze(2)).to(torch.float8_e4m3fn)
        bytes_ND = values.view(torch.uint8).flatten(1)[:, :D]
        exponent = (exponent + _BIAS).masked_fill(~amax_NP.isfinite(), _NOT_FINITE)
        return torch.cat([bytes_ND, exponent.to(torch.uint8)], 1)

    def unpack(self, packed: Tensor, out_ND: Tensor) -> None:
        """Write the rows into ``out_ND``."""
        out_ND.copy_(self.join(*self.split(packed, out_ND.shape[1])))

    def split(self, packed: Tensor, d_model: int) -> tuple[Tensor, Tensor]:
        """[N, D + P] bytes -> [N, D] numbers of e4m3 and [N, P] float32 scales."""
        exponents = packed[:, d_model:].int()
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - _BIAS)
        scales = scales.masked_fill(exponents == _NOT_FINITE, torch.nan)
        return packed[:, :d_model].contiguous().view(torch.float8_e4m3fn), scales

    def join(self, values_ND: Tensor, scales_NP: Tensor) -> Tensor:
        """[N, D] float32: the numbers times their scales."""
        return values_ND.float() * scales_NP.repeat_interleave(TILE, 1)[:, : values_ND.shape[1]]


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(x_TD: Tensor) -> Tensor:
        out, rows = torch.empty_like(x_TD), Float8Rows()
        rows.unpack(rows.pack(x_TD), out)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        grad: Tensor = grads[0]
        return grad


def round_rows(x_TD: Tensor) -> Tensor:
    """What rows are after a transfer, whether or not they travel; the gradient passes as it is."""
    out: Tensor = _Round.apply(x_TD)
    return out
