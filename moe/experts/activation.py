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
    forward_out: Callable[[Tensor, Tensor], object]
    """(z, out): out = act(z)."""
    backward_out: Callable[[Tensor, Tensor, Tensor], object]
    """(grad, z, out): out = grad · act'(z); out must not be grad or z."""
    backward: Callable[[Tensor, Tensor], Tensor]
    """(grad, z) -> grad · act'(z), by the operations of autograd."""

    def hidden(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """h from the results of the GEMMs, with gradients."""
        return self.plain(up) if gate is None else self.plain(gate) * up


def _relu2_out(z: Tensor, out: Tensor) -> object:
    return torch.clamp_min(z, 0, out=out).square_()


def _relu2_backward_out(grad: Tensor, z: Tensor, out: Tensor) -> object:
    return torch.clamp_min(z, 0, out=out).mul_(grad).mul_(2)


def _silu_out(z: Tensor, out: Tensor) -> object:
    return _aten.silu.out(z, out=out)


def _silu_backward_out(grad: Tensor, z: Tensor, out: Tensor) -> object:
    return _aten.silu_backward.grad_input(grad, z, grad_input=out)


def _gelu_out(z: Tensor, out: Tensor) -> object:
    return _aten.gelu.out(z, out=out)


def _gelu_backward_out(grad: Tensor, z: Tensor, out: Tensor) -> object:
    return _aten.gelu_backward.grad_input(grad, z, grad_input=out)


def _relu2(z: Tensor) -> Tensor:
    return F.relu(z).square()


def _relu2_backward(grad: Tensor, z: Tensor) -> Tensor:
    dz: Tensor = _aten.threshold_backward(grad * (F.relu(z) * 2), z, 0)
    return dz


def _silu_backward(grad: Tensor, z: Tensor) -> Tensor:
    dz: Tensor = _aten.silu_backward(grad, z)
    return dz


def _gelu_backward(grad: Tensor, z: Tensor) -> Tensor:
    dz: Tensor = _aten.gelu_backward(grad, z)
    return dz


ACTIVATIONS: dict[ActivationName, Activation] = {
    "swiglu": Activation("swiglu" in GATED, F.silu, _silu_out, _silu_backward_out, _silu_backward),
    "geglu": Activation("geglu" in GATED, F.gelu, _gelu_out, _gelu_backward_out, _gelu_backward),
    "gelu": Activation("gelu" in GATED, F.gelu, _gelu_out, _gelu_backward_out, _gelu_backward),
    "relu2": Activation("relu2" in GATED, _relu2, _relu2_out, _relu2_backward_out, _relu2_backward),
}
