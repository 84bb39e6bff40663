"""The experts of one layer: many small feed-forward networks over one set of rows.

Legend: S rows, R assignments of rows to experts, D d_model, F d_ff, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from moe.activation import ACTIVATIONS, ActivationName
from moe.config import Backend
from moe.megablocks_backend import experts_megablocks, why_no_megablocks
from moe.packed import experts_packed
from moe.rows import RowMap, Rows, row_map, sum_rows, take_rows
from moe.stopwatch import Stopwatch
from moe.weights import ExpertWeights
from parallel import WeightGradStore, local_shard
from parallel.delayed_weight_grad import PutGrad
from router import no_autocast

ExpertsFn = Callable[[Rows, ExpertWeights, ActivationName], Tensor]
"""(rows, weights, activation) -> [S, D]: for each row the sum over its assignments of weight ·
(h w_down + b_down), h as :mod:`moe.activation` has it; zeros for a row that no expert takes.
The weight is applied before w_down: the result is equal, and the output of w_down need not be kept
for the backward."""


def experts_loop(rows: Rows, weights: ExpertWeights, activation: ActivationName) -> Tensor:
    """The backend ``loop``: three GEMMs per expert, in any dtype and shape, and on any device."""
    act = ACTIVATIONS[activation]
    counts = rows.rows_per_expert_E.tolist()
    index = row_map(rows.source_R[: sum(counts)], len(rows.x_SD))
    # unbind, not w[e]: the backward of an index makes a full-size gradient for every expert.
    split = [[None] * len(counts) if p is None else p.unbind(0) for p in weights]
    x_by_expert = take_rows(rows.x_SD, index).split(counts)
    weights_by_expert = rows.weights_R[: sum(counts)].unsqueeze(1).split(counts)
    outputs = []
    for x, weight, *one in zip(x_by_expert, weights_by_expert, *split, strict=True):
        w = ExpertWeights._make(one)
        gate = None if w.w_gate is None else _plus(x @ w.w_gate, w.b_gate)
        h = act.hidden(gate, _plus(x @ w.w_up, w.b_up)) * weight
        y = h @ w.w_down
        outputs.append(y if w.b_down is None else y + weight * w.b_down)
    return sum_rows(torch.cat(outputs), index)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


class _PutAside(torch.autograd.Function):
    """A grouped GEMM with a delayed weight gradient, see :mod:`parallel.delayed_weight_grad`."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor, put: PutGrad) -> Tensor:
        ctx.save_for_backward(x_RD, w_EDF, ends_E)
        ctx.put = put
        return F.grouped_mm(x_RD, w_EDF, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_RD, w_EDF, ends_E = ctx.saved_tensors
        dy_RF, x_DR = grads[0].contiguous(), x_RD.detach().t()
        ctx.put(lambda: F.grouped_mm(x_DR, dy_RF, offs=ends_E))
        return F.grouped_mm(dy_RF, w_EDF.transpose(1, 2), offs=ends_E), None, None, None


class _ActivateDown(torch.autograd.Function):
    """h = weight · act(gate) * up, then h w_down; h is recomputed in the backward."""

    @staticmethod
    def forward(ctx: Any, name: ActivationName, put: PutGrad | None, *inputs: Any) -> Tensor:
        weights_R1, ends_E, w_down_EFD, up_RF, gate_RF = inputs
        ctx.save_for_backward(*inputs)
        ctx.name, ctx.put = name, put
        h_RF = ACTIVATIONS[name].hidden(gate_RF, up_RF) * weights_R1
        return F.grouped_mm(h_RF, w_down_EFD, offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weights_R1, ends_E, w_down_EFD, up_RF, gate_RF = ctx.saved_tensors
        dy_RD = grads[0].contiguous()
        inputs = [t.detach().requires_grad_() for t in (weights_R1, up_RF)]
        if gate_RF is not None:
            inputs.append(gate_RF.detach().requires_grad_())
        with torch.enable_grad():
            gate = inputs[2] if gate_RF is not None else None
            h_RF = ACTIVATIONS[ctx.name].hidden(gate, inputs[1]) * inputs[0]
        h_FR, dw_down = h_RF.detach().t(), None
        if ctx.put is None:
            dw_down = F.grouped_mm(h_FR, dy_RD, offs=ends_E)
        else:
            ctx.put(lambda: F.grouped_mm(h_FR, dy_RD, offs=ends_E))
        dh_RF = F.grouped_mm(dy_RD, w_down_EFD.transpose(1, 2), offs=ends_E)
        dweights_R1, dup_RF, *dgate = torch.autograd.grad(h_RF, inputs, dh_RF)
        return None, None, dweights_R1, None, dw_down, dup_RF, dgate[0] if dgate else None


def experts_grouped_mm(
    rows: Rows,
    weights: ExpertWeights,
    activation: ActivationName,
    weight_grad_store: WeightGradStore | None = None,
) -> Tensor:
    """The backend ``grouped_mm``: three grouped GEMMs, each for all experts.

    No step waits for an accelerator. Of the [R, F] tensors only the results of GEMMs are kept for
    the backward; with ``weight_grad_store`` also h, until the weight gradients are computed.
    """
    counts_E, R = rows.rows_per_expert_E, len(rows.source_R)
    index = row_map(rows.source_R, len(rows.x_SD))
    ends_E = counts_E.cumsum(0).to(torch.int32)
    # A grouped GEMM does not write rows past its last group, in the forward and in the backward.
    real_R1 = (torch.arange(R, device=counts_E.device) < ends_E[-1]).unsqueeze(1)
    x_RD = torch.where(real_R1, take_rows(rows.x_SD, index), 0)
    weights_R1 = torch.where(real_R1, rows.weights_R.unsqueeze(1), 0)
    w = weights
    expert_R = None if w.b_up is None else _expert_of_row(ends_E, R)

    def product(w_EDF: Tensor, bias_EF: Tensor | None) -> Tensor:
        put = None if weight_grad_store is None else weight_grad_store.put_for(w_EDF)
        if put is None:
            y_RF = F.grouped_mm(x_RD, w_EDF, offs=ends_E)
        else:
            y_RF = _PutAside.apply(x_RD, w_EDF.detach(), ends_E, put)
        if bias_EF is None or expert_R is None:
            return y_RF
        return torch.where(real_R1, y_RF + take_rows(bias_EF, expert_R), 0)

    up_RF = product(w.w_up, w.b_up)
    gate_RF = None if w.w_gate is None else product(w.w_gate, w.b_gate)
    put = None if weight_grad_store is None else weight_grad_store.put_for(w.w_down)
    w_down = w.w_down if put is None else w.w_down.detach()
    y_RD: Tensor = _ActivateDown.apply(activation, put, weights_R1, ends_E, w_down, up_RF, gate_RF)
    if w.b_down is not None and expert_R is not None:
        y_RD = y_RD + weights_R1 * take_rows(w.b_down, expert_R)
    return sum_rows(torch.where(real_R1, y_RD, 0), index)


def _expert_of_row(ends_E: Tensor, num_rows: int) -> RowMap:
    places_R = torch.arange(num_rows, device=ends_E.device, dtype=ends_E.dtype)
    expert_R = torch.searchsorted(ends_E, places_R, right=True)
    return row_map(expert_R.clamp(max=len(ends_E) - 1), len(ends_E))


_PATHS: dict[str, ExpertsFn] = {
    "loop": experts_loop,
    "grouped_mm": experts_grouped_mm,
    "megablocks": experts_megablocks,
    "packed": experts_packed,
}


def choose_backend(
    backend: Backend, d_model: int, d_ff: int, dtype: torch.dtype, device_type: str
) -> str:
    """The backend that runs: ``loop``, ``grouped_mm``, ``megablocks`` or ``packed``.

    ``auto`` takes ``packed`` on a CPU and ``grouped_mm`` elsewhere, and ``loop`` where the sizes or
    the dtype do not allow these.

    Raises ValueError where the requested backend cannot run: ``grouped_mm`` takes rows that
    are multiples of 16 bytes, in bfloat16, or on a CPU in float32 or float16; ``packed`` takes
    float32 or float64 on a CPU; ``megablocks`` takes bfloat16 on CUDA, and must be installed.
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
            f"backend (grouped_mm) must have d_model ({d_model}) and d_ff ({d_ff}) "
            f"multiples of {row} for {dtype}, and a dtype that it takes on {device_type} "
            f"({', '.join(map(str, dtypes))}); use loop or auto"
        )
    if backend == "packed" and not can_pack:
        raise ValueError(
            f"backend (packed) must have float32 or float64 on a CPU, uncompiled, not {dtype} "
            f"on {device_type}; use auto"
        )
    if backend == "megablocks":
        why = why_no_megablocks(dtype, device_type)
        if why:
            raise ValueError(f"backend (megablocks) {why}")
    if backend != "auto":
        return backend
    if can_pack:
        return "packed"
    return "grouped_mm" if can_group else "loop"


class GroupedExperts(nn.Module):
    """Feed-forward experts of one shape, stacked along their first dim."""

    def __init__(
        self,
        *,
        num_experts: int,
        d_model: int,
        d_ff: int,
        backend: Backend = "auto",
        activation: ActivationName = "swiglu",
        bias: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.backend, self.activation, self.recompute = backend, activation, recompute
        self.weight_grad_store: WeightGradStore | None = None
        self.make_parameters(num_experts, d_model, d_ff, bias)
        self.reset_parameters()

    def make_parameters(self, E: int, D: int, F: int, bias: bool) -> None:
        """Register the parameters, without values; the first dim of each is the expert."""
        gated = ACTIVATIONS[self.activation].gated

        def parameter(present: bool, *shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape)) if present else None

        self.w_gate = parameter(gated, E, D, F)
        self.w_up = nn.Parameter(torch.empty(E, D, F))
        self.w_down = nn.Parameter(torch.empty(E, F, D))
        self.b_gate = parameter(bias and gated, E, F)
        self.b_up = parameter(bias, E, F)
        self.b_down = parameter(bias, E, D)

    def local_weights(self) -> ExpertWeights:
        """The parameters of this rank's experts; FSDP has gathered them when ``forward`` runs."""
        parameters = (self.w_gate, self.w_up, self.w_down, self.b_gate, self.b_up, self.b_down)
        return ExpertWeights._make(None if p is None else local_shard(p) for p in parameters)

    def extra_repr(self) -> str:
        """The fields that ``print`` shows, with the backend that ``auto`` takes."""
        E, D, F = self.w_up.shape
        text = f"num_experts={E}, d_model={D}, d_ff={F}, {self.activation}, backend={self.backend}"
        if self.backend == "auto":
            picked = choose_backend("auto", D, F, self.w_up.dtype, self.w_up.device.type)
            text += f" ({picked} for {self.w_up.dtype} on {self.w_up.device.type})"
        return text

    def reset_parameters(self) -> None:
        """Normal, with standard deviation fan_in ** -0.5; biases are zeros."""
        for weight in (self.w_gate, self.w_up, self.w_down):
            if weight is not None:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
        for bias in (self.b_gate, self.b_up, self.b_down):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x_SD: Tensor,
        source_R: Tensor,
        weights_R: Tensor,
        rows_per_expert_E: Tensor,
        stopwatch: Stopwatch | None = None,
    ) -> Tensor:
        """The fields of :class:`moe.rows.Rows` -> [S, D], see :data:`ExpertsFn`. S may be 0.

        ``stopwatch`` runs in this method, after FSDP has gathered the parameters.
        """
        weights = self.local_weights()
        # The dtype of compute is the weights' dtype, which FSDP has cast under mixed precision, or
        # autocast's dtype: autocast does not cast grouped GEMMs by itself.
        device, dtype = x_SD.device.type, weights.w_up.dtype
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        _, d_model, d_ff = weights.w_up.shape
        run = _PATHS[choose_backend(self.backend, d_model, d_ff, dtype, device)]
        if run is experts_grouped_mm:
            run = partial(experts_grouped_mm, weight_grad_store=self.weight_grad_store)
        with no_autocast(device), nullcontext() if stopwatch is None else stopwatch:
            rows = Rows(x_SD.to(dtype), source_R, weights_R.to(dtype), rows_per_expert_E)
            weights = weights.map(lambda p: p.to(dtype))
            if not (self.recompute and torch.is_grad_enabled()):
                return run(rows, weights, self.activation)
            # Experts use no random numbers: no random state need be restored.
            out: Tensor = checkpoint(
                run, rows, weights, self.activation, use_reentrant=False, preserve_rng_state=False
            )
            return out
