"""Scores and probabilities of experts from logits, and how many tokens an expert has.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from router.config import ScoreFunc

TINY = 1e-20


def score(logits_TE: Tensor, score_func: ScoreFunc) -> tuple[Tensor, Tensor]:
    """Scores, and probabilities over the experts; both [T, E].

    Softmax scores are their own probabilities. Sigmoid scores are divided by their sum for the
    balancing losses (DeepSeek-V3, arXiv 2412.19437, eq. 19). The probabilities of a token sum to 1,
    also where all of its sigmoids underflow.
    """
    if score_func == "softmax":
        probs_TE = logits_TE.softmax(-1)
        return probs_TE, probs_TE
    scores_TE = logits_TE.sigmoid()
    sum_T1 = scores_TE.sum(-1, keepdim=True)
    # softmax(log sigmoid(z)) is sigmoid(z) / sum without an underflow. Where the quotient is exact
    # enough it stays: its bits are those of earlier runs. Logits are zeroed before, and not only
    # the result, where it is not taken: a gradient of 0 times an infinity would be NaN.
    low_T1 = sum_T1.detach() < TINY
    exact_TE = F.logsigmoid(logits_TE.masked_fill(~low_T1, 0)).softmax(-1)
    return scores_TE, torch.where(low_T1, exact_TE, scores_TE / sum_T1.clamp_min(TINY))


def count_tokens_per_expert(expert_indices_TK: Tensor, num_experts: int) -> Tensor:
    """[T, K] int64 -> [E] int64 assignments."""
    # bincount has no deterministic CUDA kernel; adding ones as integers is exact in any order.
    flat = expert_indices_TK.flatten()
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat))
