"""What is between the grouped products of experts: one kernel on CUDA, or plain operations.

Legend: R rows, F d_ff.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe import kernels
from moe.experts.activation import ACTIVATIONS


def has_kernel(name: str, rows: Tensor) -> bool:
    """Whether there is a kernel for rows of a device and dtype. It computes in float32 and rounds
    once, and so differs from the plain operations by their rounding."""
    is_known = name in kernels.NAMES and rows.dtype in kernels.DTYPES
    return kernels.available(rows.device.type) and is_known


def activate(
    name: str,
    gate_RF: Tensor | None,
    up_RF: Tensor,
    weights_R1: Tensor,
    num_real: Tensor,
) -> Tensor:
    """[R, F] h = weight · act(gate) · up, or weight · act(up) without a gate.

    Rows from ``num_real`` on may be anything; of them the kernel makes zeros.
    """
    if has_kernel(name, up_RF):
        return kernels.activate(name, gate_RF, up_RF, weights_R1, num_real)
    return ACTIVATIONS[name].hidden(gate_RF, up_RF) * weights_R1


def activate_backward(
    name: str,
    dh_RF: Tensor,
    gate_RF: Tensor | None,
    up_RF: Tensor,
    weights_R1: Tensor,
    num_real: Tensor,
) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """The gradients of gate, up and weights, and h again, from that of h."""
    # Where these gradients are to have gradients, autograd must see their operations.
    if has_kernel(name, up_RF) and not torch.is_grad_enabled():
        return kernels.activate_backward(name, dh_RF, gate_RF, up_RF, weights_R1, num_real)
    # Written out: torch.compile does not trace autograd.grad within a backward.
    act = ACTIVATIONS[name]
    acted_RF = act.plain(up_RF if gate_RF is None else gate_RF)
    lifted_RF = up_RF if act.lift is None else act.lift(up_RF)
    h_RF = acted_RF if gate_RF is None else acted_RF * lifted_RF
    dweights_R1 = (dh_RF * h_RF).sum(1, keepdim=True)
    dh_RF = dh_RF * weights_R1
    if gate_RF is None:
        return None, act.backward(dh_RF, up_RF), dweights_R1, h_RF * weights_R1
    dgate_RF = act.backward(dh_RF * lifted_RF, gate_RF)
    dup_RF = act.up_backward(dh_RF * acted_RF, up_RF)
    return dgate_RF, dup_RF, dweights_R1, h_RF * weights_R1
