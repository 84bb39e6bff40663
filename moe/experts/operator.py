"""The experts as one operator, for torch.compile and torch.export.

Legend: S rows, R assignments of rows to experts, D d_model, F d_ff, E experts of this rank, G 2
with a gate and 1 without.

How many rows an expert gets is data: a compiler cannot trace a loop over experts, nor a size that
depends on such a number. To the compiler these operators are opaque calls, whose outputs' shapes
follow from their inputs' shapes. What runs inside are the backends of eager mode. The graph has no
break, and no number of rows compiles again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from moe.experts.activation import ACTIVATIONS
from moe.experts.packed import packed_backward, packed_forward
from moe.experts.paths import PATHS, loop_backward
from moe.experts.weights import ExpertWeights
from moe.rows import Rows

_INPUTS = (
    "Tensor x_SD, Tensor source_R, Tensor weights_R, Tensor rows_per_expert_E, Tensor? w_gate, "
    "Tensor w_up, Tensor w_down, Tensor? b_gate, Tensor? b_up, Tensor? b_down"
)
_NUM_INPUTS = 10


def _split(inputs: Sequence[Any]) -> tuple[Rows, ExpertWeights]:
    return Rows(*inputs[:4]), ExpertWeights(*inputs[4:])


def _experts(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, activation, backend, keep = args
    rows, weights = _split(inputs)
    if backend == "packed" and keep:
        return packed_forward(rows, weights, activation)
    return PATHS[backend](rows, weights, activation), rows.x_SD.new_empty(0)


def _experts_shapes(*args: Any) -> tuple[Tensor, Tensor]:
    *inputs, activation, backend, keep = args
    rows, weights = _split(inputs)
    kept = [0]
    if backend == "packed" and keep:
        # shape[0] and not len(), which would fix the number.
        G, R = 1 + ACTIVATIONS[activation].gated, rows.source_R.shape[0]
        kept = [G, R, weights.w_up.shape[2]]
    return rows.x_SD.new_empty(rows.x_SD.shape), rows.x_SD.new_empty(kept)


def _backward(*args: Any) -> list[Tensor]:
    """The gradients of x_SD, weights_R and the parameters that there are."""
    dy_SD, *inputs, kept, activation, backend = args
    rows, weights = _split(inputs)
    if kept.numel() or (backend == "packed" and not len(rows.source_R)):
        grads = packed_backward(rows, weights, activation, dy_SD.contiguous(), kept)
    else:
        # Nothing was kept: the products are computed again.
        grads = loop_backward(rows, weights, activation, dy_SD)
    dx, dweights, dparameters = grads
    return [dx, dweights, *(p for p in dparameters if p is not None)]


def _backward_shapes(*args: Any) -> list[Tensor]:
    _, *inputs, _, _, _ = args
    rows, weights = _split(inputs)
    leaves = [rows.x_SD, rows.weights_R, *(p for p in weights if p is not None)]
    return [t.new_empty(t.shape) for t in leaves]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.activation, ctx.backend, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradients(ctx: Any, dy_SD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    dx_SD, dweights_R, *rest = torch.ops.convoy.experts_backward(
        dy_SD, *saved, ctx.activation, ctx.backend
    )
    grads = iter(rest)
    parameters = (None if p is None else next(grads) for p in saved[4:_NUM_INPUTS])
    return dx_SD, None, dweights_R, None, *parameters, None, None, None


_operator = torch.library.custom_op(
    "convoy::experts",
    _experts,
    mutates_args=(),
    schema=f"({_INPUTS}, str activation, str backend, bool keep) -> (Tensor, Tensor)",
)
_operator.register_fake(_experts_shapes)
_operator.register_autograd(_gradients, setup_context=_keep)
_backward_operator = torch.library.custom_op(
    "convoy::experts_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor dy_SD, {_INPUTS}, Tensor kept, str activation, str backend) -> Tensor[]",
)
_backward_operator.register_fake(_backward_shapes)


def experts_operator(
    rows: Rows, weights: ExpertWeights, activation: str, backend: str, keep: bool
) -> Tensor:
    """As the backend's :data:`moe.experts.paths.ExpertsFn`, in one operator.

    ``packed`` keeps its products for the backward where ``keep`` is true. Every other backend
    computes them again.
    """
    assert not weights.have_adapters
    base = weights[: weights.num_base]
    out = torch.ops.convoy.experts(*rows[:4], *base, activation, backend, keep)
    return cast(Tensor, out[0])
