"""Scores and probabilities of experts from logits, and how many tokens an expert has.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from router.config import ScoreFunc
from router.few_rows import with_enough_rows

TINY = 1e-20
_LOW = -40.0


def score(logits_TE: Tensor, score_func: ScoreFunc) -> tuple[Tensor, Tensor]:
    """Scores, and probabilities over the experts; both [T, E].

    Softmax scores are their own probabilities. Other scores are divided by their sum for the
    balancing losses (DeepSeek-V3, arXiv 2412.19437, eq. 19). The probabilities of a token sum to 1,
    also where all of its scores underflow.
    """
    if score_func == "softmax":
        probs_TE = logits_TE.softmax(-1)
        return probs_TE, probs_TE
    sigmoid = score_func == "sigmoid"
    function = torch.sigmoid if sigmoid else sqrt_softplus
    scores_TE = with_enough_rows(function, logits_TE, whole_vectors=True)
    sum_T1 = scores_TE.sum(-1, keepdim=True)
    # softmax(log score) is score / sum without an underflow. Where the quotient is exact
    # enough it stays: its bits are those of earlier runs. Logits are zeroed before, and not only
    # the result, where it is not taken: a gradient of 0 times an infinity would be NaN.
    low_T1 = sum_T1.detach() < TINY
    low_TE = logits_TE.masked_fill(~low_T1, 0)
    # The log of a square root of softplus is half the logit where all of a token's are that low.
    exact_TE = (F.logsigmoid(low_TE) if sigmoid else low_TE / 2).softmax(-1)
    return scores_TE, torch.where(low_T1, exact_TE, scores_TE / sum_T1.clamp_min(TINY))


def sqrt_softplus(logits: Tensor) -> Tensor:
    """sqrt(log(1 + exp(z))), with finite gradients.

    Softplus is exp(z) to a part in 1e17 below -40. The gradient of its square root, which divides
    by the root, would be NaN where exp(z) underflows.
    """
    low = logits < _LOW
    root = F.softplus(logits.masked_fill(low, 0)).sqrt()
    return torch.where(low, (logits.clamp(max=_LOW) / 2).exp(), root)


def count_tokens_per_expert(expert_indices_TK: Tensor, num_experts: int) -> Tensor:
    """[T, K] int64 -> [E] int64 assignments."""
    # bincount has no deterministic CUDA kernel; adding ones as integers is exact in any order.
    flat = expert_indices_TK.flatten()
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat))
