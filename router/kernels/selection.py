"""The choice of experts from logits in one pass over memory: two launches, and one backward.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from router.config import RouterConfig
from router.kernels.operators import OPTIONS, operator
from router.scores import TINY, score

MAX_EXPERTS = 1024
"""The most experts: a program holds all of them for a token."""
MAX_TOP_K = 32
"""The most choices, which are written out one after another in the program's text."""
SCORE_FUNCS = ("softmax", "sigmoid")
"""The score functions that the kernel knows."""
_ELEMENTS = 1024
"""Logits of one program, eight for each of its threads."""
_FLAGS = "int top_k, bool sigmoid, bool after_topk, bool norm, float scale"


class Selection(NamedTuple):
    """The experts of tokens; the first three fields have gradients."""

    probs_TE: Tensor
    """[T, E] float32, see :func:`router.scores.score`."""
    weights_TK: Tensor
    """[T, K] float32, with ``route_scale``; NaN for a token whose logits are not finite."""
    logsumexp_T: Tensor
    """[T] float32, of the logits."""
    indices_TK: Tensor
    """[T, K] int64, best first; of equal preferences the lowest expert first."""
    tokens_per_expert_E: Tensor
    """[E] int64."""
    nonfinite_T: Tensor
    """[T] bool: a logit is NaN or infinite."""
    entropy_T: Tensor
    """[T] float32, of the probabilities, in nats."""


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def _launch(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, sigmoid: bool, after_topk: bool,
    norm: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    from router.kernels import triton_selection as kernels

    logits_TE = logits_TE.contiguous()
    T, E = logits_TE.shape
    out = Selection(*_shapes(logits_TE, bias_E, top_k, sigmoid, after_topk, norm, scale))
    out.tokens_per_expert_E.zero_()
    if T:
        width = max(_power_of_two(E), 16)
        rows = max(_ELEMENTS // width, 1)
        kernels.select[(-(-T // rows),)](
            logits_TE, None if bias_E is None else bias_E.contiguous(), out.probs_TE,
            out.indices_TK, out.weights_TK, out.tokens_per_expert_E, out.nonfinite_T,
            out.entropy_T, out.logsumexp_T, T, scale, E=E, K=top_k, TINY=TINY, SIGMOID=sigmoid,
            AFTER_TOPK=after_topk, NORM=norm, ROWS=rows, WIDTH=width,
            SLOTS=_power_of_two(top_k), num_warps=4, **OPTIONS,
        )  # fmt: skip
    return tuple(out)


def _shapes(logits_TE: Tensor, bias_E: Tensor | None, top_k: int, *_: Any) -> tuple[Tensor, ...]:
    T, E = logits_TE.shape
    new = logits_TE.new_empty
    numbers = new((T, E)), new((T, top_k)), new((T,))
    counts = new((T, top_k), dtype=torch.int64), new((E,), dtype=torch.int64)
    return *numbers, *counts, new((T,), dtype=torch.bool), new((T,))


def _launch_gradient(
    logits_TE: Tensor, indices_TK: Tensor, dprobs_TE: Tensor | None, dweights_TK: Tensor | None,
    dlogsumexp_T: Tensor | None, top_k: int, sigmoid: bool, after_topk: bool, norm: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    from router.kernels import triton_selection as kernels

    logits_TE, indices_TK = logits_TE.contiguous(), indices_TK.contiguous()
    T, E = logits_TE.shape
    equal = dprobs_TE is not None and dprobs_TE.stride()[0] == 0 and T > 0
    dprobs = dprobs_TE[0] if equal and dprobs_TE is not None else dprobs_TE
    grads = [None if g is None else g.contiguous() for g in (dprobs, dweights_TK, dlogsumexp_T)]
    dlogits_TE = torch.empty_like(logits_TE)
    if T:
        width = max(_power_of_two(E), 16)
        rows = max(_ELEMENTS // width, 1)
        kernels.select_gradient[(-(-T // rows),)](
            logits_TE, indices_TK, *grads, dlogits_TE, T, scale, E=E, K=top_k, TINY=TINY,
            SIGMOID=sigmoid, AFTER_TOPK=after_topk, NORM=norm, ROWS=rows, WIDTH=width,
            EQUAL=equal, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return dlogits_TE


_select = operator(
    f"select_experts(Tensor logits, Tensor? bias, {_FLAGS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _launch, _shapes, launches=2,
)  # fmt: skip
_select_gradient = operator(
    "select_experts_backward(Tensor logits, Tensor indices, Tensor? dprobs, Tensor? dweights, "
    f"Tensor? dlogsumexp, {_FLAGS}) -> Tensor",
    _launch_gradient, lambda logits_TE, *_: logits_TE.new_empty(logits_TE.shape), launches=1,
)  # fmt: skip


def selection_gradient(
    logits_TE: Tensor, indices_TK: Tensor, dprobs_TE: Tensor | None, dweights_TK: Tensor | None,
    dlogsumexp_T: Tensor | None, top_k: int, sigmoid: bool, after_topk: bool, norm: bool,
    scale: float,
) -> Tensor:  # fmt: skip
    """The kernel's gradient in plain operations, which autograd can differentiate again."""
    scores_TE, probs_TE = score(logits_TE, "sigmoid" if sigmoid else "softmax")
    dlogits_TE = torch.zeros_like(logits_TE)
    dprobs = torch.zeros_like(logits_TE) if dprobs_TE is None else dprobs_TE
    if dweights_TK is not None:
        bad_T1 = ~logits_TE.detach().isfinite().all(-1, keepdim=True)
        dw_TK = (dweights_TK * scale).masked_fill(bad_T1, 0)
        if after_topk:
            w_TK = logits_TE.gather(1, indices_TK).softmax(-1)
            ds_TK = w_TK * (dw_TK - (dw_TK * w_TK).sum(-1, keepdim=True))
            dlogits_TE = dlogits_TE.scatter_add(1, indices_TK, ds_TK)
        else:
            if norm:
                chosen_TK = scores_TE.gather(1, indices_TK)
                total_T1 = chosen_TK.sum(-1, keepdim=True)
                mean_T1 = (dw_TK * chosen_TK).sum(-1, keepdim=True) / total_T1.clamp_min(TINY)
                dw_TK = dw_TK - mean_T1.where(total_T1 >= TINY, 0)
                dw_TK = dw_TK / total_T1.clamp_min(TINY)
            ds_TE = torch.zeros_like(logits_TE).scatter_add(1, indices_TK, dw_TK)
            if sigmoid:
                dlogits_TE = dlogits_TE + ds_TE * scores_TE * (1 - scores_TE)
            else:
                dprobs = dprobs + ds_TE
    inner_TE = probs_TE * (dprobs - (dprobs * probs_TE).sum(-1, keepdim=True))
    dlogits_TE = dlogits_TE + (inner_TE * (1 - scores_TE) if sigmoid else inner_TE)
    if dlogsumexp_T is not None:
        dlogits_TE = dlogits_TE + dlogsumexp_T.unsqueeze(1) * logits_TE.softmax(-1)
    return dlogits_TE


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(logits_TE: Tensor, bias_E: Tensor | None, *flags: Any) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = _select(logits_TE, bias_E, *flags)
        return outputs

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits_TE, _, *ctx.flags = inputs
        chosen = Selection(*output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*chosen[3:])
        ctx.save_for_backward(logits_TE, chosen.indices_TK)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        nothing = (None,) * (1 + len(ctx.flags))
        if all(grad is None for grad in grads[:3]):
            return None, *nothing
        # Where this gradient is to have a gradient, autograd must see its operations.
        gradient = selection_gradient if torch.is_grad_enabled() else _select_gradient
        return gradient(*ctx.saved_tensors, *grads[:3], *ctx.flags), *nothing


def select_experts(logits_TE: Tensor, bias_E: Tensor | None, config: RouterConfig) -> Selection:
    """The ``top_k`` best of all experts, without groups of experts.

    Args:
        logits_TE: [T, E] float32, E at most :data:`MAX_EXPERTS`.
        bias_E: [E] float32, added to the scores for the choice alone; None without.
        config: ``top_k``, ``score_func``, ``softmax_after_topk``, ``norm_topk_prob`` and
            ``route_scale``.
    """
    return Selection._make(
        _Select.apply(
            logits_TE, bias_E, config.top_k, config.score_func == "sigmoid",
            config.softmax_after_topk, config.norm_topk_prob, config.route_scale,
        )
    )  # fmt: skip
