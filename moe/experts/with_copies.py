"""The experts of a rank together with its copies of other ranks' experts.

The own experts' rows and the copies' rows are computed one after the other, by one backend. While a
rank computes its own experts, the parameters of its copies arrive; in the backward, the gradients
of copies travel to their owners while the own experts' gradients are computed.

Legend: S rows, R assignments, E own experts, C copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.copies import Lending, Loan
from moe.experts.paths import ExpertsFn
from moe.experts.weights import ExpertWeights
from moe.rows import Rows
from parallel.exact import UnitSums


@dataclass(frozen=True)
class Backends:
    """What computes own experts, and copies."""

    own: ExpertsFn
    copies: ExpertsFn
    own_sums: UnitSums | None = None
    """Under exact sums, where ``own`` adds gradients; None elsewhere."""
    copies_sums: UnitSums | None = None
    """Where ``copies`` adds gradients."""


def experts_with_copies(
    rows: Rows,
    weights: ExpertWeights,
    activation: str,
    lending: Lending,
    run: Backends,
    watch: AbstractContextManager[Any],
) -> Tensor:
    """See :data:`moe.experts.paths.ExpertsFn`; ``rows`` are counted by place, own experts first.

    Every rank of the group must call, and run the backward. No second derivatives.

    Args:
        rows: of own experts, then of copies.
        weights: of the own experts.
        activation: of the experts.
        lending: who lends what.
        run: computes experts.
        watch: entered while this rank computes, and not while the rank waits for parameters.
    """
    own_rows, copied_rows = _divide(rows, lending)
    own = [p for p in weights if p is not None]
    loan = Loan(lending, own)
    loan.start()
    borrowed = loan.borrowed()
    trainable = [torch.is_grad_enabled() and p.requires_grad for p in own]
    tracked: Sequence[Tensor] = ()
    if any(trainable):
        tracked = _Own.apply(loan, run, *compress(own, trainable))
        own = _replaced(own, trainable, tracked)
    with watch:
        y_SD = run.own(own_rows, _weights_like(weights, own), activation)
    loan.wait()
    if tracked:
        # After the own experts: autograd then sends gradients of copies before it computes theirs.
        arriving = list(compress(borrowed, trainable))
        borrowed = _replaced(borrowed, trainable, _Borrow.apply(loan, run, arriving, *tracked))
    if lending.num_copies:
        with watch:
            copied = run.copies(copied_rows, _weights_like(weights, borrowed), activation)
        y_SD = y_SD + copied
    if y_SD.requires_grad:
        y_SD = _BorrowAgain.apply(lending, loan.buffer, y_SD, *loan.own)
        loan.release()
    return y_SD


def _replaced(
    tensors: Sequence[Tensor], chosen: Sequence[bool], by: Sequence[Tensor]
) -> list[Tensor]:
    """The tensors, with the chosen ones replaced in their order."""
    rest = iter(by)
    return [next(rest) if c else tensor for tensor, c in zip(tensors, chosen, strict=True)]


def _divide(rows: Rows, lending: Lending) -> tuple[Rows, Rows]:
    own, number = lending.own_experts, lending.own_rows
    cut = [number, len(rows.source_R) - number]
    sources, weights = rows.source_R.split(cut), rows.weights_R.split(cut)
    # Other ranks may have more copies: the places beyond this rank's get no rows.
    counts = rows.rows_per_expert_E[: own + lending.num_copies].tensor_split([own])
    first, second = (
        Rows(rows.x_SD, *fields) for fields in zip(sources, weights, counts, strict=True)
    )
    return first, second


def _weights_like(weights: ExpertWeights, present: Sequence[Tensor]) -> ExpertWeights:
    rest = iter(present)
    return weights.map(lambda _: next(rest))


class _Own(torch.autograd.Function):
    """Trainable parameters of own experts; the backward adds the gradients that copies send."""

    @staticmethod
    def forward(ctx: Any, loan: Loan, run: Backends, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.loan, ctx.run = loan, run
        ctx.save_for_backward(*own)
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        loan, sums, own = ctx.loan, ctx.run.own_sums, ctx.saved_tensors
        if not loan.is_returning:  # a rank without copies, which still receives
            _start_back(loan, ctx.run, [None] * len(own), own)
        if sums is not None:
            for expert, totals in loan.returned():
                sums.add_totals(expert, totals)
            return None, None, *grads
        out = [_writable(grad, p) for grad, p in zip(grads, own, strict=True)]
        for expert, fields in loan.returned():
            for grad, field in zip(out, fields, strict=True):
                grad[expert].add_(field)
        return None, None, *out


def _writable(grad: Tensor | None, like: Tensor) -> Tensor:
    """A gradient that may be added to: the backend made it for this call, or a copy."""
    if grad is None:
        return torch.zeros_like(like)
    return grad.clone() if 0 in grad.stride() or grad._base is not None else grad


class _Borrow(torch.autograd.Function):
    """Parameters of copies, which arrive later; the backward sends their gradients back.

    The arguments after the arriving parameters are those of :class:`_Own`, whose backward then
    comes after this one.
    """

    @staticmethod
    def forward(
        ctx: Any, loan: Loan, run: Backends, arriving: list[Tensor], *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.loan, ctx.run = loan, run
        ctx.save_for_backward(*own)
        ctx.set_materialize_grads(False)
        return tuple(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        _start_back(ctx.loan, ctx.run, grads, ctx.saved_tensors)
        return None, None, None, *[None] * len(grads)


def _start_back(
    loan: Loan, run: Backends, grads: Sequence[Tensor | None], own: Sequence[Tensor]
) -> None:
    if run.copies_sums is not None:
        totals = run.copies_sums.totals(own[0].device)
        loan.start_back(totals, totals)
    else:
        loan.start_back(grads, own)


class _BorrowAgain(torch.autograd.Function):
    """The output; the backward first fetches the parameters of copies again."""

    @staticmethod
    def forward(ctx: Any, lending: Lending, buffer: Tensor, y_SD: Tensor, *own: Tensor) -> Tensor:
        ctx.lending = lending
        # In a recomputation the saved tensors are those of the second forward: of its loan, to
        # whose memory the copies' products refer. A hook may copy what is saved to the host, so the
        # memory is released afterwards.
        ctx.save_for_backward(buffer, *own)
        # Not a view: FSDP warns of modules that return one.
        out: Tensor = torch.ops.aten._unsafe_view(y_SD, y_SD.shape)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        buffer, *own = ctx.saved_tensors
        loan = Loan(ctx.lending, own, buffer)
        loan.start()
        loan.wait()
        return None, None, grads[0], *[None] * len(own)
