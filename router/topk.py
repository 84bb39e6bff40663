"""The token-choice router: scores for every expert, the top_k of them for every token.

Legend: T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from router.config import RouterConfig, ScoreFunc
from router.losses import load_balance_loss, z_loss


class RouterOutput(NamedTuple):
    """Where every token goes. A NamedTuple, so that FSDP and pipelining see the tensors in it."""

    expert_indices_TK: Tensor
    """[T, K] int64, best first."""
    expert_weights_TK: Tensor
    """[T, K] float32, the weight of each chosen expert's output."""
    tokens_per_expert_E: Tensor
    """[E] int64, assignments of these tokens; sums to T·K."""
    load_balance_loss: Tensor
    """Scalar float32, not yet weighted."""
    z_loss: Tensor
    """Scalar float32, not yet weighted."""


def score(logits_TE: Tensor, score_func: ScoreFunc) -> tuple[Tensor, Tensor]:
    """Scores, and the same normalized to probabilities over the experts; both [T, E].

    Softmax scores are their own probabilities. Sigmoid scores are divided by their sum for the
    load-balancing loss (DeepSeek-V3, arXiv 2412.19437, eq. 19).
    """
    if score_func == "softmax":
        probs_TE = logits_TE.softmax(-1)
        return probs_TE, probs_TE
    scores_TE = logits_TE.sigmoid()
    return scores_TE, scores_TE / scores_TE.sum(-1, keepdim=True).clamp_min(1e-20)


def count_tokens_per_expert(expert_indices_TK: Tensor, num_experts: int) -> Tensor:
    """[T, K] int64 -> [E] int64 assignments."""
    # bincount has no deterministic CUDA kernel; adding ones as integers is exact in any order.
    flat = expert_indices_TK.flatten()
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat))


class TopKRouter(nn.Module):
    """A linear map to one logit per expert, a score function, and top-k selection.

    The map, the scores and the losses are in float32 whatever the model's dtype, under autocast
    too: in bfloat16 the logits of nearby experts tie, and which of them wins is arbitrary.
    """

    def __init__(self, d_model: int, config: RouterConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal with standard deviation 0.02, so that first scores are close to uniform."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x_TD: Tensor) -> RouterOutput:
        """Route [T, D] tokens; T may be 0.

        A NaN or an infinity in ``x_TD`` is not looked for here, which would stall an accelerator at
        every layer: it reaches the loss, and the step barrier refuses the step.
        """
        with torch.autocast(x_TD.device.type, enabled=False):
            return self._route(F.linear(x_TD.float(), self.weight.float()))

    def _route(self, logits_TE: Tensor) -> RouterOutput:
        config = self.config
        scores_TE, probs_TE = score(logits_TE, config.score_func)
        weights_TK, indices_TK = scores_TE.topk(config.top_k, dim=-1)
        if config.renormalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(1e-20)
        counts_E = count_tokens_per_expert(indices_TK, config.num_experts)
        return RouterOutput(
            expert_indices_TK=indices_TK,
            expert_weights_TK=weights_TK,
            tokens_per_expert_E=counts_E,
            load_balance_loss=load_balance_loss(probs_TE, counts_E, config.top_k),
            z_loss=z_loss(logits_TE),
        )
