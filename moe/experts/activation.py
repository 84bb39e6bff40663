"""Activation functions of experts.

Legend: n rows of one expert, F d_ff.

Gated: h = act(x w_gate) * lift(x w_up), where lift(up) is up unless said otherwise; plain:
h = act(x w_up). SwiGLU and GeGLU are Shazeer's (arXiv 2002.05202, section 2), GELU is the exact
one, x · Phi(x) (Hendrycks and Gimpel, arXiv 1606.08415), and ReLU² is max(x, 0)² (So et al.,
arXiv 2109.08668). gpt-oss has act(z) = z · sigmoid(1.702 z) and lift(up) = up + 1 (``swiglu`` of
its reference implementation, github.com/openai/gpt-oss, gpt_oss/torch/model.py).

With a limit L gates are min(x w_gate, L), and ups are in [-L, L] before they are lifted. The key of
such a function in :data:`ACTIVATIONS` is its name, ``@`` and the limit: ``swiglu@10.0``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.config import GATED

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
    lift: Callable[[Tensor], Tensor] | None = None
    """up -> what act(gate) is multiplied by; None for up itself."""
    limit: float = 0.0
    """Of gates and ups; 0 for none."""

    def hidden(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """h from the results of the GEMMs, with gradients."""
        if gate is None:
            return self.plain(up)
        return self.plain(gate) * (up if self.lift is None else self.lift(up))

    def up_backward(self, grad: Tensor, up: Tensor) -> Tensor:
        """The gradient of up from that of ``lift(up)``."""
        return grad.masked_fill(up.abs() > self.limit, 0) if self.limit else grad


def _relu2(z: Tensor) -> Tensor:
    return F.relu(z).square()


def _relu2_out(z: Tensor, out: Tensor) -> object:
    return torch.clamp_min(z, 0, out=out).square_()


def _relu2_backward_out(grad: Tensor, z: Tensor, grad_input: Tensor) -> object:
    return torch.clamp_min(z, 0, out=grad_input).mul_(grad).mul_(2)


def _relu2_backward(grad: Tensor, z: Tensor) -> Tensor:
    dz: Tensor = _aten.threshold_backward(grad * (F.relu(z) * 2), z, 0)
    return dz


_ALPHA = 1.702


def _oai(z: Tensor) -> Tensor:
    return z * (z * _ALPHA).sigmoid()


def _oai_out(z: Tensor, out: Tensor) -> object:
    return torch.mul(z, (z * _ALPHA).sigmoid_(), out=out)


def _oai_backward(grad: Tensor, z: Tensor) -> Tensor:
    s = (z * _ALPHA).sigmoid()
    return grad * (s * (1 + _ALPHA * z * (1 - s)))


def _oai_backward_out(grad: Tensor, z: Tensor, grad_input: Tensor) -> object:
    return grad_input.copy_(_oai_backward(grad, z))


def _plus_one(up: Tensor) -> Tensor:
    return up + 1


_SILU = (F.silu, _aten.silu.out, _aten.silu_backward.grad_input, _aten.silu_backward)
_GELU = (F.gelu, _aten.gelu.out, _aten.gelu_backward.grad_input, _aten.gelu_backward)
_RELU2 = (_relu2, _relu2_out, _relu2_backward_out, _relu2_backward)
_OAI = (_oai, _oai_out, _oai_backward_out, _oai_backward)


def _limited_plain(act: Activation, limit: float, z: Tensor) -> Tensor:
    return act.plain(z.clamp(max=limit))


def _limited_out(act: Activation, limit: float, z: Tensor, out: Tensor) -> object:
    return act.forward_out(z.clamp(max=limit), out=out)


def _limited_backward(act: Activation, limit: float, grad: Tensor, z: Tensor) -> Tensor:
    return act.backward(grad, z.clamp(max=limit)).masked_fill(z > limit, 0)


def _limited_backward_out(
    act: Activation, limit: float, grad: Tensor, z: Tensor, grad_input: Tensor
) -> object:
    act.backward_out(grad, z.clamp(max=limit), grad_input=grad_input)
    return grad_input.masked_fill_(z > limit, 0)


def _limited_lift(act: Activation, limit: float, up: Tensor) -> Tensor:
    up = up.clamp(min=-limit, max=limit)
    return up if act.lift is None else act.lift(up)


def _limited(act: Activation, limit: float) -> Activation:
    """The function of clamped gates and ups."""
    return Activation(
        act.gated,
        partial(_limited_plain, act, limit),
        partial(_limited_out, act, limit),
        partial(_limited_backward_out, act, limit),
        partial(_limited_backward, act, limit),
        partial(_limited_lift, act, limit),
        limit,
    )


class _Activations(dict[str, Activation]):
    """Those of :data:`moe.config.ActivationName`; limited ones are made when they are asked for."""

    def __missing__(self, key: str) -> Activation:
        name, mark, limit = key.partition("@")
        if not mark:
            raise KeyError(key)
        made = self[key] = _limited(self[name], float(limit))
        return made


ACTIVATIONS = _Activations(
    swiglu=Activation("swiglu" in GATED, *_SILU),
    geglu=Activation("geglu" in GATED, *_GELU),
    gelu=Activation("gelu" in GATED, *_GELU),
    relu2=Activation("relu2" in GATED, *_RELU2),
    swiglu_oai=Activation("swiglu_oai" in GATED, *_OAI, _plus_one),
)
