"""RMSNorm, with few passes over memory on a CPU.

Legend: D the normed size, N rows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.RMSNorm):
    """y = x / sqrt(mean(x²) + eps) · weight over the last dim (arXiv 1910.07467, equation 4)."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same with another weight, as tensor parallelism needs."""
        assert self.eps is not None
        # Accelerators have one kernel for all of this, and a compiler makes one.
        plain = x.device.type == weight.device.type == "cpu" and x.dtype == torch.float32
        if not plain or weight.dtype != x.dtype or torch.compiler.is_compiling():
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        out: Tensor = _Normalize.apply(x, weight, self.eps)[0]
        return out


class _Normalize(torch.autograd.Function):
    """PyTorch computes the norm on a CPU by single operations, and its gradient by a dozen, each
    with new memory."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        return torch.mul(x, scale).mul_(weight), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(inputs[0], inputs[1], output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        dy, D = grads[0], x.shape[-1]
        work = dy * x
        dweight = torch.mv(work.reshape(-1, D).t(), scale.reshape(-1))
        # dx = scale · (weight · dy - x · scale² · mean(weight · dy · x))
        along = work.mul_(weight).sum(-1, keepdim=True).mul_(scale.pow(3)).div_(-D)
        dx = torch.mul(dy, weight, out=work).mul_(scale).addcmul_(x, along)
        return dx, dweight, None
