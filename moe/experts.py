"""The experts of one layer: many small SwiGLU networks over one sorted batch of rows.

Legend: R rows received, D d_model, F d_ff, E experts held here (all of them, or a rank's block).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.config import Backend
from moe.packed import experts_packed
from parallel import local_shard
from router import no_autocast

ExpertsFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x_RD, weights_R, rows_per_expert_E, w_gate_EDF, w_up_EDF, w_down_EFD) -> y_RD: for each row
weight · w_down(silu(x w_gate) * (x w_up)). The weight is applied before w_down, which is the same
and spares keeping the outputs for the weights' gradient."""


def experts_loop(
    x_RD: Tensor,
    weights_R: Tensor,
    rows_per_expert_E: Tensor,
    w_gate_EDF: Tensor,
    w_up_EDF: Tensor,
    w_down_EFD: Tensor,
) -> Tensor:
    """The plain path: three products per expert, in any dtype and any shape."""
    outputs = []
    counts = rows_per_expert_E.tolist()
    # unbind, not w[e]: the backward of an index makes a full-size gradient for every expert.
    experts = zip(
        x_RD.split(counts),
        weights_R.unsqueeze(1).split(counts),
        w_gate_EDF.unbind(0),
        w_up_EDF.unbind(0),
        w_down_EFD.unbind(0),
        strict=True,
    )
    for x, weights, w_gate, w_up, w_down in experts:
        outputs.append((F.silu(x @ w_gate) * (x @ w_up) * weights) @ w_down)
    return torch.cat(outputs)


def experts_grouped_mm(
    x_RD: Tensor,
    weights_R: Tensor,
    rows_per_expert_E: Tensor,
    w_gate_EDF: Tensor,
    w_up_EDF: Tensor,
    w_down_EFD: Tensor,
) -> Tensor:
    """The fast path of accelerators: one grouped product for all experts, three in all.

    No row may be missing: rows_per_expert_E sums to R. Nothing here waits for an accelerator.
    """
    ends_E = rows_per_expert_E.cumsum(0).to(torch.int32)
    gate_RF = F.grouped_mm(x_RD, w_gate_EDF, offs=ends_E)
    up_RF = F.grouped_mm(x_RD, w_up_EDF, offs=ends_E)
    h_RF = F.silu(gate_RF) * up_RF * weights_R.unsqueeze(1)
    y_RD: Tensor = F.grouped_mm(h_RF, w_down_EFD, offs=ends_E)
    if y_RD.requires_grad:
        # An expanded gradient, such as .sum() hands down, is refused by grouped_mm's backward.
        y_RD.register_hook(Tensor.contiguous)
    return y_RD


def choose_backend(
    backend: Backend, d_model: int, d_ff: int, dtype: torch.dtype, device_type: str
) -> ExpertsFn:
    """The one place where a path is chosen.

    Raises ValueError where the path that is asked for cannot run: ``grouped_mm`` takes rows that
    are multiples of 16 bytes, in bfloat16, or on a CPU in float32 or float16; ``packed`` takes
    float32 or float64 on a CPU.
    """
    compiling = torch.compiler.is_compiling()
    row = 16 // dtype.itemsize
    dtypes = [torch.bfloat16] if device_type in ("cpu", "cuda") else []
    # Compiled, torch takes bfloat16 alone on any device.
    if device_type == "cpu" and not compiling:
        dtypes += [torch.float32, torch.float16]
    can_group = dtype in dtypes and d_model % row == 0 and d_ff % row == 0
    can_pack = device_type == "cpu" and dtype in (torch.float32, torch.float64) and not compiling
    if backend == "grouped_mm" and not can_group:
        raise ValueError(
            f"moe.backend (grouped_mm) must have moe.d_model ({d_model}) and moe.d_ff ({d_ff}) "
            f"multiples of {row} for {dtype}, and a dtype that it takes on {device_type} "
            f"({', '.join(map(str, dtypes))}); use loop or auto"
        )
    if backend == "packed" and not can_pack:
        raise ValueError(
            f"moe.backend (packed) must have float32 or float64 on a CPU, uncompiled, not {dtype} "
            f"on {device_type}; use auto"
        )
    if backend == "loop":
        return experts_loop
    if backend == "packed" or (backend == "auto" and can_pack):
        return experts_packed
    return experts_grouped_mm if can_group else experts_loop


class GroupedExperts(nn.Module):
    """SwiGLU experts, w_down(silu(x w_gate) * (x w_up)), stacked along their first dim."""

    def __init__(
        self, num_experts: int, d_model: int, d_ff: int, backend: Backend = "auto"
    ) -> None:
        super().__init__()
        self.backend = backend
        self.w_gate = nn.Parameter(torch.empty(num_experts, d_model, d_ff))
        self.w_up = nn.Parameter(torch.empty(num_experts, d_model, d_ff))
        self.w_down = nn.Parameter(torch.empty(num_experts, d_ff, d_model))
        self.reset_parameters()

    def extra_repr(self) -> str:
        """What print shows."""
        E, D, F = self.w_gate.shape
        return f"num_experts={E}, d_model={D}, d_ff={F}, backend={self.backend}"

    def reset_parameters(self) -> None:
        """Normal, with standard deviation fan_in ** -0.5."""
        for weight in (self.w_gate, self.w_up, self.w_down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x_RD: Tensor, weights_R: Tensor, rows_per_expert_E: Tensor) -> Tensor:
        """[R, D] rows sorted by expert, their weights, [E] int64 counts -> [R, D]. R may be 0."""
        weights = [local_shard(w) for w in (self.w_gate, self.w_up, self.w_down)]
        # The layer's dtype is its weights', since under mixed precision FSDP has cast them, or
        # autocast's, which does not know grouped products.
        device, dtype = x_RD.device.type, weights[0].dtype
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        _, d_model, d_ff = weights[0].shape
        run = choose_backend(self.backend, d_model, d_ff, dtype, device)
        with no_autocast(device):
            rows = x_RD.to(dtype), weights_R.to(dtype), rows_per_expert_E
            return run(*rows, *(w.to(dtype) for w in weights))
