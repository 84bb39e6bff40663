"""RMSNorm, with few passes over memory on a CPU.

Legend: D the normed size, N rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

RowSum = Callable[[Tensor, Tensor], Callable[[], Tensor]]
"""Begins the sum of rows [..., D] times a factor of each row, [..., 1]; the result gives [D]. The
call reads both inputs to their ends."""


def _row_sum(x: Tensor, factors: Tensor) -> Callable[[], Tensor]:
    total = torch.mv(x.reshape(-1, x.shape[-1]).t(), factors.reshape(-1))
    return lambda: total


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x²) + eps) · weight over the last dim (arXiv 1910.07467, equation 4)."""

    row_sum: RowSum | None = None
    """How the gradient of the weight is summed on a CPU, in float32; None for one product."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same with another weight, as tensor parallelism needs."""
        assert self.eps is not None
        if not self.sums_rows(x):
            # Where the norm is several operations, the view adds their gradients up before others
            # of x are added: with one order of addition, whatever else uses x.
            return F.rms_norm(x.view_as(x), self.normalized_shape, weight, self.eps)
        out: Tensor = _Normalize.apply(x, weight, self.eps, self.row_sum)[0]
        return out

    def sums_rows(self, x: Tensor) -> bool:
        """Whether the weight's gradient for an input is summed by ``row_sum``."""
        # Accelerators have one kernel for the whole norm, and a compiler makes one.
        plain = x.device.type == self.weight.device.type == "cpu" and x.dtype == torch.float32
        return plain and self.weight.dtype == x.dtype and not torch.compiler.is_compiling()


class _Normalize(torch.autograd.Function):
    """PyTorch computes the norm on a CPU by single operations, and its gradient by a dozen, each
    with new memory."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, eps: float, row_sum: RowSum | None
    ) -> tuple[Tensor, Tensor]:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        return torch.mul(x, scale).mul_(weight), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], inputs[1], output[1])
        ctx.row_sum = inputs[3]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        x, weight, scale = ctx.saved_tensors
        dy, D = grads[0], x.shape[-1]
        work = dy * x
        # Other ranks may take part in the sum, which goes on while dx is computed.
        dweight = (ctx.row_sum or _row_sum)(work, scale)
        # dx = scale · (weight · dy - x · scale² · mean(weight · dy · x))
        along = work.mul_(weight).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-D)
        dx = torch.mul(dy, weight, out=work).mul_(scale).addcmul_(x, along)
        return dx, dweight(), None, None
