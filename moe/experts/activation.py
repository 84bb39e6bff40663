"""Activation functions of experts.

Legend: n rows of one expert, F d_ff.

Gated: h = act(x w_gate) * (x w_up); plain: h = act(x w_up). SwiGLU and GeGLU are Shazeer's (arXiv
2002.05202, section 2), GELU is the exact one, x · Phi(x) (Hendrycks and Gimpel, arXiv 1606.08415),
and ReLU² is max(x, 0)² (So et al., arXiv 2109.08668).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.config import GATED, ActivationName

_aten = torch.ops.aten


class Activation(NamedTuple):
    """One activation function, for autograd and with preallocated outputs."""

    gated: bool
    plain: Callable[[Tensor], Tensor]
    forward_out: Callable[..., object]
    """(z, out=h): h = act(z)."""
    backward_out: Callable[..., object]
    """(grad, z, grad_input=dz): dz = grad · act'(z); dz must not be grad or z."""
    backward: Callable[[Tensor, Tensor], Tensor]
    """(grad, z) -> grad · act'(z), by the operations of autograd."""

    def hidden(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """h from the results of the GEMMs, with gradients."""
        return self.plain(up) if gate is None else self.plain(gate) * up


def _relu2(z: Tensor) -> Tensor:
    return F.relu(z).square()


def _relu2_out(z: Tensor, out: Tensor) -> object:
    return torch.clamp_min(z, 0, out=out).square_()


def _relu2_backward_out(grad: Tensor, z: Tensor, grad_input: Tensor) -> object:
    return torch.clamp_min(z, 0, out=grad_input).mul_(grad).mul_(2)


def _relu2_backward(grad: Tensor, z: Tensor) -> Tensor:
    dz: Tensor = _aten.threshold_backward(grad * (F.relu(z) * 2), z, 0)
    return dz


_SILU = (F.silu, _aten.silu.out, _aten.silu_backward.grad_input, _aten.silu_backward)
_GELU = (F.gelu, _aten.gelu.out, _aten.gelu_backward.grad_input, _aten.gelu_backward)
_RELU2 = (_relu2, _relu2_out, _relu2_backward_out, _relu2_backward)
ACTIVATIONS: dict[ActivationName, Activation] = {
    "swiglu": Activation("swiglu" in GATED, *_SILU),
    "geglu": Activation("geglu" in GATED, *_GELU),
    "gelu": Activation("gelu" in GATED, *_GELU),
    "relu2": Activation("relu2" in GATED, *_RELU2),
}
