"""The losses and means of a call in one pass over the probabilities: two launches, one backward.

Legend: T tokens, E experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from router.config import RouterConfig
from router.kernels.operators import OPTIONS, operator
from router.kernels.selection import Selection

_ELEMENTS = 2048
"""Probabilities that a program adds at a time."""
_STEPS = 4
_ROWS = 1024
"""Tokens of a program of the gradient."""


class Balance(NamedTuple):
    """Scalars of a call, in float32 where not said otherwise; the first three have gradients."""

    load_balance: Tensor
    """As :func:`router.losses.load_balance_loss`."""
    z: Tensor
    """As :func:`router.losses.z_loss`."""
    total: Tensor
    """The sum of the two with their coefficients."""
    entropy: Tensor
    """The mean over tokens."""
    num_nonfinite: Tensor
    """int64."""
    sequence_balance: Tensor
    """0: the kernel has no sequence-wise loss."""
    no_tokens: Tensor
    """0, int64."""


def _width(num_experts: int) -> int:
    return max(1 << (num_experts - 1).bit_length(), 16)


def _launch(
    probs_TE: Tensor, logsumexp_T: Tensor, entropy_T: Tensor, nonfinite_T: Tensor, counts_E: Tensor,
    of_balance: float, of_z: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from router.kernels import triton_balance as kernels

    T, E = probs_TE.shape
    width = _width(E)
    rows = max(_ELEMENTS // width, 1)
    pieces = -(-T // (rows * _STEPS))
    partial = probs_TE.new_empty(pieces, E + 3)
    sizes = {"E": E, "WIDTH": width, "ROWS": rows}
    if T:
        kernels.sum_pieces[(pieces,)](
            probs_TE.contiguous(), logsumexp_T.contiguous(), entropy_T.contiguous(),
            nonfinite_T.contiguous(), partial, T, **sizes, STEPS=_STEPS, num_warps=4, **OPTIONS,
        )  # fmt: skip
    out = _shapes(probs_TE)
    kernels.losses[(1,)](
        partial, counts_E.contiguous(), *out, pieces, float(max(T, 1)), of_balance, of_z, **sizes,
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    return out


def _shapes(probs_TE: Tensor, *_: Any) -> tuple[Tensor, ...]:
    def numbers(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        return [probs_TE.new_empty((), dtype=dtype) for _ in range(count)]

    return *numbers(4), *numbers(1, torch.int64), *numbers(1), *numbers(1, torch.int64)


def _launch_gradient(
    logsumexp_T: Tensor, counts_E: Tensor, dbalance: Tensor | None, dz: Tensor | None,
    dtotal: Tensor | None, of_balance: float, of_z: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from router.kernels import triton_balance as kernels

    (T,), (E,) = logsumexp_T.shape, counts_E.shape
    dprobs_E, dlogsumexp_T = out = _gradient_shapes(logsumexp_T, counts_E)
    kernels.losses_gradient[(max(-(-T // _ROWS), 1),)](
        counts_E.contiguous(), logsumexp_T.contiguous(), dbalance, dz, dtotal, dprobs_E,
        dlogsumexp_T, T, float(max(T, 1)), of_balance, of_z, E=E, WIDTH=_width(E), ROWS=_ROWS,
        num_warps=4, **OPTIONS,
    )  # fmt: skip
    return out


def _gradient_shapes(logsumexp_T: Tensor, counts_E: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return logsumexp_T.new_empty(counts_E.shape), logsumexp_T.new_empty(logsumexp_T.shape)


_balance = operator(
    "balance(Tensor probs, Tensor logsumexp, Tensor entropy, Tensor nonfinite, Tensor counts, "
    "float of_balance, float of_z) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch, _shapes, launches=2,
)  # fmt: skip
_balance_gradient = operator(
    "balance_backward(Tensor logsumexp, Tensor counts, Tensor? dbalance, Tensor? dz, "
    "Tensor? dtotal, float of_balance, float of_z) -> (Tensor, Tensor)",
    _launch_gradient, _gradient_shapes, launches=1,
)  # fmt: skip


def balance_gradient(
    logsumexp_T: Tensor, counts_E: Tensor, dbalance: Tensor | None, dz: Tensor | None,
    dtotal: Tensor | None, of_balance: float, of_z: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The kernel's gradient in plain operations, which autograd can differentiate again."""
    nothing, tokens = logsumexp_T.new_zeros(()), max(logsumexp_T.shape[0], 1)
    dtotal = nothing if dtotal is None else dtotal
    factor = (nothing if dbalance is None else dbalance) + of_balance * dtotal
    slope = (nothing if dz is None else dz) + of_z * dtotal
    counts_E = counts_E.to(logsumexp_T.dtype)
    fractions_E = counts_E / counts_E.sum().clamp(min=1)
    return factor * len(counts_E) * fractions_E / tokens, 2 * logsumexp_T * slope / tokens


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _balance(*inputs)
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        probs_TE, logsumexp_T, _, _, counts_E, *ctx.coefficients = inputs
        ctx.shape = probs_TE.shape
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*output[3:])
        ctx.save_for_backward(logsumexp_T, counts_E)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if all(grad is None for grad in grads[:3]):
            return (None,) * 7
        # Where this gradient is to have a gradient, autograd must see its operations.
        gradient = balance_gradient if torch.is_grad_enabled() else _balance_gradient
        dprobs_E, dlogsumexp_T = gradient(*ctx.saved_tensors, *grads[:3], *ctx.coefficients)
        return dprobs_E.expand(ctx.shape), dlogsumexp_T, None, None, None, None, None


def balance(chosen: Selection, counts_E: Tensor, config: RouterConfig) -> Balance:
    """The losses of the rule ``standard`` without the sequence-wise one, and two statistics.

    Args:
        chosen: the experts of tokens.
        counts_E: [E] int64 the assignments that the load-balancing loss counts.
        config: ``aux_loss_coeff`` and ``z_loss_coeff``.
    """
    return Balance._make(
        _Balance.apply(
            chosen.probs_TE, chosen.logsumexp_T, chosen.entropy_T, chosen.nonfinite_T, counts_E,
            float(config.aux_loss_coeff), float(config.z_loss_coeff),
        )
    )  # fmt: skip
