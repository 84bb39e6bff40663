"""The activation of experts, times up, times the weight of the routing, in one pass over memory.

Legend: R rows, F d_ff.
"""

from __future__ import annotations

from torch import Tensor

from moe.kernels.rows import columns_of
from router.kernels import OPTIONS, operator

NAMES: tuple[str, ...] = ("swiglu", "geglu", "gelu", "relu2")
"""The activations that there are kernels for."""
_CURVES = {"swiglu": 0, "geglu": 1, "gelu": 1, "relu2": 2}


def _launch(
    gate_RF: Tensor | None, up_RF: Tensor, weights_R1: Tensor, num_real: Tensor, name: str
) -> Tensor:
    from moe.kernels import triton_activation as kernels

    R, F = up_RF.shape
    h_RF = up_RF.new_empty(R, F)
    if R and F:
        block, warps = columns_of(F)
        kernels.activate[(R,)](
            None if gate_RF is None else gate_RF.contiguous(), up_RF.contiguous(),
            weights_R1.contiguous(), num_real, h_RF, CURVE=_CURVES[name], F=F, BLOCK=block,
            num_warps=warps, **OPTIONS,
        )  # fmt: skip
    return h_RF


def _launch_backward(
    dh_RF: Tensor, gate_RF: Tensor | None, up_RF: Tensor, weights_R1: Tensor, num_real: Tensor,
    name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from moe.kernels import triton_activation as kernels

    R, F = up_RF.shape
    outputs = _shapes_backward(dh_RF, gate_RF, up_RF, weights_R1, num_real, name)
    dgate_RF, dup_RF, dweights_R1, h_RF = outputs
    if R and F:
        block, warps = columns_of(F)
        kernels.activate_backward[(R,)](
            dh_RF.contiguous(), None if gate_RF is None else gate_RF.contiguous(),
            up_RF.contiguous(), weights_R1.contiguous(), num_real,
            None if gate_RF is None else dgate_RF, dup_RF, dweights_R1, h_RF,
            CURVE=_CURVES[name], F=F, BLOCK=block, num_warps=warps, **OPTIONS,
        )  # fmt: skip
    return outputs


def _shapes_backward(
    dh_RF: Tensor, gate_RF: Tensor | None, up_RF: Tensor, weights_R1: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    new, shape = up_RF.new_empty, up_RF.shape
    dweights_R1 = weights_R1.new_empty(weights_R1.shape)
    return new((0,) if gate_RF is None else shape), new(shape), dweights_R1, new(shape)


_activate = operator(
    "activate(Tensor? gate, Tensor up, Tensor weights, Tensor num_real, str name) -> Tensor",
    _launch, lambda _, up_RF, *__: up_RF.new_empty(up_RF.shape), launches=1,
)  # fmt: skip
_activate_backward = operator(
    "activate_backward(Tensor dh, Tensor? gate, Tensor up, Tensor weights, Tensor num_real, "
    "str name) -> (Tensor, Tensor, Tensor, Tensor)",
    _launch_backward, _shapes_backward, launches=1,
)  # fmt: skip


def activate(
    name: str,
    gate_RF: Tensor | None,
    up_RF: Tensor,
    weights_R1: Tensor,
    num_real: Tensor,
) -> Tensor:
    """[R, F] h = weight · act(gate) · up, or weight · act(up) without a gate; computed in float32
    and rounded once. Zeros from row ``num_real`` on, whatever is there. No gradient."""
    h_RF: Tensor = _activate(gate_RF, up_RF, weights_R1, num_real, name)
    return h_RF


def activate_backward(
    name: str,
    dh_RF: Tensor,
    gate_RF: Tensor | None,
    up_RF: Tensor,
    weights_R1: Tensor,
    num_real: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The gradients of gate, up and weights, and h again; zeros from row ``num_real`` on."""
    dgate_RF, dup_RF, dweights_R1, h_RF = _activate_backward(
        dh_RF, gate_RF, up_RF, weights_R1, num_real, name
    )
    return None if gate_RF is None else dgate_RF, dup_RF, dweights_R1, h_RF
