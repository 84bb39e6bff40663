"""The backends: how experts are computed, and which backend runs.

Legend: S rows, R assignments of rows to experts, D d_model, F d_ff, E experts of this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.config import Backend
from moe.experts.activate import activate, activate_backward, has_kernel
from moe.experts.activation import ACTIVATIONS, Activation
from moe.experts.megablocks_backend import experts_megablocks, why_no_megablocks
from moe.experts.packed import experts_packed
from moe.experts.weights import ExpertWeights
from moe.float8 import Float8Tally, Product, float8_matmul
from moe.rows import RowMap, Rows, row_map, sum_rows, take_rows
from moe.rows import has_kernel as rows_have_kernel
from parallel.apply import PutGrad, WeightGradStore
from router import constant_in_graphs

ExpertsFn = Callable[[Rows, ExpertWeights, str], Tensor]
"""(rows, weights, activation) -> [S, D]: for each row the sum over its assignments of weight ·
(h w_down + b_down), h as :mod:`moe.experts.activation` has it; zeros for a row that no expert
takes.
The weight is applied before w_down: the result is equal, and the output of w_down need not be kept
for the backward."""


def experts_loop(
    rows: Rows,
    weights: ExpertWeights,
    activation: str,
    product: Product = torch.matmul,
) -> Tensor:
    """The backend ``loop``: three GEMMs per expert, in any dtype and shape, and on any device.

    ``product`` computes each of them, and with autograd their gradients.
    """
    act = ACTIVATIONS[activation]
    counts = rows.rows_per_expert_E.tolist()
    index = row_map(rows.source_R[: sum(counts)], len(rows.x_SD))
    # unbind, not w[e]: the backward of an index makes a full-size gradient for every expert.
    split = [[None] * len(counts) if p is None else p.unbind(0) for p in weights]
    x_by_expert = take_rows(rows.x_SD, index).split(counts)
    weights_by_expert = rows.weights_R[: sum(counts)].unsqueeze(1).split(counts)
    outputs = []
    for x, weight, *one in zip(x_by_expert, weights_by_expert, *split, strict=True):
        outputs.append(one_expert(act, x, weight, ExpertWeights._make(one), product))
    return sum_rows(torch.cat(outputs), index)


def one_expert(
    act: Activation,
    x_nD: Tensor,
    weight_n1: Tensor,
    w: ExpertWeights,
    product: Product = torch.matmul,
) -> Tensor:
    """The output of some rows of one expert, [n, D]."""
    gate = None
    if w.w_gate is not None:
        gate = _adapted(_plus(product(x_nD, w.w_gate), w.b_gate), x_nD, w.gate_a, w.gate_b)
    up = _adapted(_plus(product(x_nD, w.w_up), w.b_up), x_nD, w.up_a, w.up_b)
    h = act.hidden(gate, up) * weight_n1
    y = _adapted(product(h, w.w_down), h, w.down_a, w.down_b)
    return y if w.b_down is None else y + weight_n1 * w.b_down


def _adapted(y: Tensor, x: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """A product of one expert with what its adapter adds."""
    return y if a is None or b is None else y + (x @ a) @ b.t()


def loop_backward(
    rows: Rows, weights: ExpertWeights, activation: str, dy_SD: Tensor
) -> tuple[Tensor, Tensor, ExpertWeights]:
    """The gradients of x_SD, weights_R and the parameters without autograd, from the inputs alone:
    of :func:`experts_loop`, and so of every backend."""
    act = ACTIVATIONS[activation]
    counts = rows.rows_per_expert_E.tolist()
    R = sum(counts)
    index = row_map(rows.source_R[:R], len(rows.x_SD))
    grads, dweights_R = weights.map(torch.zeros_like), torch.zeros_like(rows.weights_R)
    dx_RD = rows.x_SD.new_empty(R, rows.x_SD.shape[1])
    ends = list(accumulate(counts))
    for e, (count, end) in enumerate(zip(counts, ends, strict=True)):
        here = slice(end - count, end)
        source, weight = rows.source_R[here], rows.weights_R[here].unsqueeze(1)
        dx_RD[here], dweights_R[here], one = one_expert_backward(
            act, rows.x_SD[source], weight, weights.of(e), dy_SD[source]
        )
        for to, grad in zip(grads.of(e), one, strict=True):
            if to is not None and grad is not None:
                to.copy_(grad)
    return sum_rows(dx_RD, index), dweights_R, grads


def one_expert_backward(
    act: Activation, x: Tensor, weight: Tensor, w: ExpertWeights, dy: Tensor
) -> tuple[Tensor, Tensor, ExpertWeights]:
    """The gradients of :func:`one_expert`: [n, D] of x, [n] of weight, and the parameters'."""
    up = _plus(x @ w.w_up, w.b_up)
    gate = None if w.w_gate is None else _plus(x @ w.w_gate, w.b_gate)
    z = up if gate is None else gate
    acted = act.plain(z)
    lifted = up if act.lift is None else act.lift(up)
    h = acted if gate is None else acted * lifted
    dh = dy @ w.w_down.t()
    dweight = (dh * h).sum(1)
    dh = dh * weight
    dz = act.backward(dh if gate is None else dh * lifted, z)
    dup = dz if gate is None else act.up_backward(dh * acted, up)
    dx = dup @ w.w_up.t()
    dw_gate = db_gate = db_up = db_down = None
    if w.w_gate is not None:
        dx += dz @ w.w_gate.t()
        dw_gate = x.t() @ dz
    if w.b_down is not None:
        dweight += dy @ w.b_down
        db_down, db_up = (dy * weight).sum(0), dup.sum(0)
        db_gate = None if w.b_gate is None else dz.sum(0)
    dw_up, dw_down = x.t() @ dup, (h * weight).t() @ dy
    return dx, dweight, ExpertWeights(dw_gate, dw_up, dw_down, db_gate, db_up, db_down)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


class _PutAside(torch.autograd.Function):
    """A grouped GEMM with a delayed weight gradient, see
    :mod:`parallel.apply.delayed_weight_grad`."""

    @staticmethod
    def forward(x_RD: Tensor, w_EDF: Tensor, ends_E: Tensor, put: PutGrad) -> Tensor:
        return F.grouped_mm(x_RD, w_EDF, offs=ends_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.put = inputs
        ctx.save_for_backward(*tensors)

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
    def forward(
        name: str,
        put: PutGrad | None,
        weights_R1: Tensor,
        ends_E: Tensor,
        w_down_EFD: Tensor,
        up_RF: Tensor,
        gate_RF: Tensor | None,
    ) -> Tensor:
        h_RF = activate(name, gate_RF, up_RF, weights_R1, ends_E[-1])
        return F.grouped_mm(h_RF, w_down_EFD, offs=ends_E)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name, ctx.put, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weights_R1, ends_E, w_down_EFD, up_RF, gate_RF = ctx.saved_tensors
        dy_RD, dw_down = grads[0].contiguous(), None
        dh_RF = F.grouped_mm(dy_RD, w_down_EFD.transpose(1, 2), offs=ends_E)
        dgate_RF, dup_RF, dweights_R1, h_RF = activate_backward(
            ctx.name, dh_RF, gate_RF, up_RF, weights_R1, ends_E[-1]
        )
        h_FR = h_RF.t()
        if ctx.put is not None:
            ctx.put(lambda: F.grouped_mm(h_FR, dy_RD, offs=ends_E))
        elif ctx.needs_input_grad[4]:
            dw_down = F.grouped_mm(h_FR, dy_RD, offs=ends_E)
        return None, None, dweights_R1, None, dw_down, dup_RF, dgate_RF


class _Activate(torch.autograd.Function):
    """h = weight · act(gate) * up, which is kept: an adapter's product and the base's need it."""

    @staticmethod
    def forward(
        name: str,
        weights_R1: Tensor,
        num_real: Tensor,
        up_RF: Tensor,
        gate_RF: Tensor | None,
    ) -> Tensor:
        return activate(name, gate_RF, up_RF, weights_R1, num_real)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.name, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weights_R1, num_real, up_RF, gate_RF = ctx.saved_tensors
        dgate_RF, dup_RF, dweights_R1, _ = activate_backward(
            ctx.name, grads[0], gate_RF, up_RF, weights_R1, num_real
        )
        return None, dweights_R1, None, dup_RF, dgate_RF


def _grouped_adapted(
    y_RF: Tensor, x_RD: Tensor, a_EDL: Tensor | None, b_EFL: Tensor | None, ends_E: Tensor
) -> Tensor:
    """As :func:`_adapted`, for all experts: two more grouped GEMMs."""
    if a_EDL is None or b_EFL is None:
        return y_RF
    # Rows of a grouped GEMM are multiples of 16 bytes: a rank that is not gets zeros.
    missing = -a_EDL.shape[2] % (16 // a_EDL.element_size())
    if missing:
        a_EDL, b_EFL = F.pad(a_EDL, (0, missing)), F.pad(b_EFL, (0, missing))
    low_RL = F.grouped_mm(x_RD, a_EDL, offs=ends_E)
    return y_RF + F.grouped_mm(low_RL, b_EFL.mT, offs=ends_E)


def experts_grouped_mm(
    rows: Rows,
    weights: ExpertWeights,
    activation: str,
    weight_grad_store: WeightGradStore | None = None,
) -> Tensor:
    """The backend ``grouped_mm``: three grouped GEMMs, each for all experts.

    No step waits for an accelerator that has a kernel for them, see :func:`has_grouped_kernel`. Of
    the [R, F] tensors only the results of GEMMs are kept for the backward; with
    ``weight_grad_store`` also h, until the weight gradients are computed.
    """
    counts_E, R = rows.rows_per_expert_E, len(rows.source_R)
    if rows.sorted is not None and rows_have_kernel(rows.x_SD):
        index, ends_E = rows.sorted
    else:
        index = row_map(rows.source_R, len(rows.x_SD))
        ends_E = counts_E.cumsum(0).to(torch.int32)
    # A grouped GEMM does not write rows past its last group, in the forward and in the backward.
    num_real = ends_E[-1]
    x_RD = take_rows(rows.x_SD, index, num_real)
    w = weights.map(_with_dense_rows)
    has_biases = w.b_up is not None or w.b_down is not None
    weights_R1 = rows.weights_R.unsqueeze(1)
    if has_biases or not has_kernel(activation, rows.x_SD):
        real_R1 = (torch.arange(R, device=counts_E.device) < num_real).unsqueeze(1)
        weights_R1 = torch.where(real_R1, weights_R1, 0)
    expert_R = _expert_of_row(ends_E, R) if has_biases else None

    def put_for(w_EDF: Tensor, *others: Tensor | None) -> PutGrad | None:
        # Without another gradient autograd would not call the backward that puts this one.
        waits = any(tensor is not None and tensor.requires_grad for tensor in others)
        return weight_grad_store.put_for(w_EDF) if weight_grad_store and waits else None

    def product(x_RD: Tensor, w_EDF: Tensor) -> Tensor:
        put = put_for(w_EDF, x_RD)
        if put is None:
            return F.grouped_mm(x_RD, w_EDF, offs=ends_E)
        y_RF: Tensor = _PutAside.apply(x_RD, w_EDF.detach(), ends_E, put)
        return y_RF

    up_RF = _grouped_adapted(product(x_RD, w.w_up), x_RD, w.up_a, w.up_b, ends_E)
    gate_RF = None
    if w.b_up is not None and expert_R is not None:
        up_RF = torch.where(real_R1, up_RF + take_rows(w.b_up, expert_R), 0)
    if w.w_gate is not None:
        gate_RF = _grouped_adapted(product(x_RD, w.w_gate), x_RD, w.gate_a, w.gate_b, ends_E)
        if w.b_gate is not None and expert_R is not None:
            gate_RF = torch.where(real_R1, gate_RF + take_rows(w.b_gate, expert_R), 0)
    if w.down_a is None:
        put = put_for(w.w_down, weights_R1, up_RF, gate_RF)
        down = w.w_down if put is None else w.w_down.detach()
        y_RD: Tensor = _ActivateDown.apply(
            activation, put, weights_R1, ends_E, down, up_RF, gate_RF
        )
    else:
        h_RF: Tensor = _Activate.apply(activation, weights_R1, num_real, up_RF, gate_RF)
        y_RD = _grouped_adapted(product(h_RF, w.w_down), h_RF, w.down_a, w.down_b, ends_E)
    if w.b_down is not None and expert_R is not None:
        y_RD = y_RD + weights_R1 * take_rows(w.b_down, expert_R)
    return sum_rows(y_RD, index, num_real)


def _with_dense_rows(weight: Tensor) -> Tensor:
    """The weights where rows or columns are dense, as a grouped GEMM takes them; else a copy."""
    return weight if weight.ndim < 3 or 1 in weight.stride()[1:] else weight.contiguous()


def _expert_of_row(ends_E: Tensor, num_rows: int) -> RowMap:
    places_R = torch.arange(num_rows, device=ends_E.device, dtype=ends_E.dtype)
    expert_R = torch.searchsorted(ends_E, places_R, right=True)
    return row_map(expert_R.clamp(max=len(ends_E) - 1), len(ends_E))


def experts_float8(
    rows: Rows,
    weights: ExpertWeights,
    activation: str,
    tally: Float8Tally | None = None,
) -> Tensor:
    """The backend ``loop`` with products in float8: no grouped product of torch 2.13 has their
    scales. On CUDA the host waits for the number of rows of each expert."""
    return experts_loop(rows, weights, activation, partial(float8_matmul, tally=tally))


PATHS: dict[str, ExpertsFn] = {
    "loop": experts_loop,
    "grouped_mm": experts_grouped_mm,
    "megablocks": experts_megablocks,
    "packed": experts_packed,
}


@constant_in_graphs
def has_grouped_kernel() -> bool:
    """Whether torch's grouped product on CUDA is one kernel on this device.

    The kernel is for compute capability 9 and 10 (``aten/src/ATen/native/cuda/GroupedBlas.cpp`` of
    torch 2.13). On other devices torch copies the groups' ends to the host and loops over the
    groups: the host waits nine times in a layer, where the backend ``loop`` waits once.
    """
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_properties().major in (9, 10)


def choose_backend(
    backend: Backend, d_model: int, d_ff: int, dtype: torch.dtype, device_type: str
) -> str:
    """The backend that runs: ``loop``, ``grouped_mm``, ``megablocks`` or ``packed``.

    ``auto`` takes ``packed`` on a CPU and ``grouped_mm`` elsewhere, and ``loop`` where the sizes or
    the dtype do not allow these, or a CUDA device has no kernel for ``grouped_mm``.

    Raises ValueError where the requested backend cannot run: ``grouped_mm`` takes rows that
    are multiples of 16 bytes, in bfloat16, or on a CPU in float32 or float16; ``packed`` takes
    float32 or float64 on a CPU; ``megablocks`` takes bfloat16 on CUDA, and must be installed.
    """
    row = 16 // dtype.itemsize
    dtypes = [torch.bfloat16] if device_type in ("cpu", "cuda") else []
    if device_type == "cpu":
        dtypes += [torch.float32, torch.float16]
    can_group = dtype in dtypes and d_model % row == 0 and d_ff % row == 0
    can_pack = device_type == "cpu" and dtype in (torch.float32, torch.float64)
    if backend == "grouped_mm" and not can_group:
        raise ValueError(
            f"backend (grouped_mm) must have d_model ({d_model}) and d_ff ({d_ff}) "
            f"multiples of {row} for {dtype}, and a dtype that it takes on {device_type} "
            f"({', '.join(map(str, dtypes))}); use loop or auto"
        )
    if backend == "packed" and not can_pack:
        raise ValueError(
            f"backend (packed) must have float32 or float64 on a CPU, not {dtype} "
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
    is_fast = device_type != "cuda" or has_grouped_kernel()
    return "grouped_mm" if can_group and is_fast else "loop"
