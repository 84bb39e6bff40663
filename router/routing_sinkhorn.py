"""The routing ``sinkhorn``: the best experts after a balancing normalization within a call.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.config import ROUTINGS
from router.routing import Scored
from router.routing_top_k import TopK

_ITERATIONS = 8


class Sinkhorn(TopK):
    """Top_k of a plan that is balanced over the tokens of a call; plain top_k in evaluation."""

    traits = ROUTINGS["sinkhorn"]

    def preferences(self, scored: Scored) -> Tensor:
        """See :class:`router.routing.Routing`."""
        # Evaluation takes the plain choice, as Megatron-core does. So does one token: the only
        # plan with equal sums over experts is then uniform, whatever the logits.
        if not scored.training or len(scored.logits_TE) <= 1:
            return scored.logits_TE
        return sinkhorn(scored.logits_TE, token_mask_T=scored.token_mask_T)


def sinkhorn(
    logits_TE: Tensor,
    iterations: int = _ITERATIONS,
    token_mask_T: Tensor | None = None,
) -> Tensor:
    """Scale exp(logits) to equal sums over tokens and equal sums over experts: [T, E] -> [T, E].

    Sinkhorn's alternate normalization of rows and columns (Sinkhorn and Knopp, 1967), as used for
    routing by Clark et al. (arXiv 2202.01169, section 3.1). Logarithms avoid an overflow, and a
    fixed number of rounds avoids waiting for an accelerator. At the end rows sum to 1 / T and
    columns nearly to 1 / E. One token has no other to be balanced with: the result is its softmax.
    Rows where ``token_mask_T`` is false are in no sum over tokens.
    """
    if len(logits_TE) == 1:
        return logits_TE.softmax(-1)
    log_TE = logits_TE
    for _ in range(iterations):
        over_tokens_TE = log_TE
        if token_mask_T is not None:
            # Not minus infinity: a column without any token would be NaN.
            least = torch.finfo(log_TE.dtype).min / 2
            over_tokens_TE = log_TE.masked_fill(~token_mask_T.unsqueeze(1), least)
        log_TE = log_TE - over_tokens_TE.logsumexp(0, keepdim=True)
        log_TE = log_TE - log_TE.logsumexp(1, keepdim=True)
    if token_mask_T is None:
        return log_TE.exp() / max(logits_TE.shape[0], 1)
    num_tokens = token_mask_T.sum()
    plan_TE = log_TE.exp() / num_tokens.clamp(min=1)
    return torch.where(num_tokens > 1, plan_TE, logits_TE.softmax(-1))
