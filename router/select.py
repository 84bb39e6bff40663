"""The choice of experts for each token. A choice is discrete: no function here has a gradient.

Legend: T tokens, E experts, K top_k, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SINKHORN_ITERATIONS = 8


def select_top_k(scores_TE: Tensor, top_k: int) -> Tensor:
    """The top_k best experts of each token, best first: [T, E] -> [T, K] int64."""
    return scores_TE.topk(top_k, dim=-1).indices


def count_tokens_per_expert(expert_indices_TK: Tensor, num_experts: int) -> Tensor:
    """[T, K] int64 -> [E] int64 assignments."""
    # bincount has no deterministic CUDA kernel; adding ones as integers is exact in any order.
    flat = expert_indices_TK.flatten()
    counts_E = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return counts_E.scatter_add_(0, flat, torch.ones_like(flat))


def limit_to_groups(
    scores_TE: Tensor, n_groups: int, topk_groups: int, topk_per_group: int
) -> Tensor:
    """Set the scores of experts outside a token's best groups to minus infinity.

    Experts are in n_groups equal blocks. A group's score is the sum of its topk_per_group best; the
    topk_groups best groups stay (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, with
    topk_per_group = 2; with groups that are nodes this limits how many nodes a token is sent to).

    Args:
        scores_TE: [T, E], bias included.

    Returns:
        [T, E].
    """
    T, E = scores_TE.shape
    scores_TGe = scores_TE.view(T, n_groups, E // n_groups)
    group_scores_TG = scores_TGe.topk(topk_per_group, dim=-1).values.sum(-1)
    best = group_scores_TG.topk(topk_groups, dim=-1).indices
    out_TG = torch.ones_like(group_scores_TG, dtype=torch.bool).scatter_(1, best, False)
    return scores_TGe.masked_fill(out_TG.unsqueeze(-1), -torch.inf).view(T, E)


def expert_choice(scores_TE: Tensor, top_k: int, token_mask_T: Tensor | None = None) -> Tensor:
    """Each expert takes the ceil(T·K / E) tokens that score highest for it, earlier ones on a tie.

    Zhou et al., arXiv 2202.09368, section 3.2, with their capacity factor c = K. A token may get
    no expert, or all. The choice looks at all T tokens: in a causal model it lets a token depend on
    later ones. With a mask T counts the tokens where ``token_mask_T`` is true, and no expert takes
    another.

    Returns:
        [T, E] int64: column e is e where expert e takes the token, and E, no expert, elsewhere.
    """
    T, E = scores_TE.shape
    taken_TE = torch.zeros_like(scores_TE, dtype=torch.bool)
    if token_mask_T is None:
        takes = min(-(-T * top_k // E), T)
        best = scores_TE.argsort(dim=0, descending=True, stable=True)[:takes]
        taken_TE = taken_TE.scatter_(0, best, True)
    else:
        masked_TE = scores_TE.masked_fill(~token_mask_T.unsqueeze(1), -torch.inf)
        order_TE = masked_TE.argsort(dim=0, descending=True, stable=True)
        # The number of tokens stays on the device: a copy to the host would wait.
        num_tokens = token_mask_T.sum()
        takes_1 = torch.minimum(-(-num_tokens * top_k // E), num_tokens)
        rank_T1 = torch.arange(T, device=scores_TE.device).unsqueeze(1)
        taken_TE = taken_TE.scatter_(0, order_TE, (rank_T1 < takes_1).expand(T, E))
        taken_TE = taken_TE & token_mask_T.unsqueeze(1)
    return torch.where(taken_TE, torch.arange(E, device=scores_TE.device), E)


def sinkhorn(
    logits_TE: Tensor,
    iterations: int = _SINKHORN_ITERATIONS,
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


def force_load_balance(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    device: torch.device,
    token_mask_T: Tensor | None = None,
) -> Tensor:
    """[T, K]: experts in turn, whatever the scores; the counts of experts differ by at most one.

    Tokens where ``token_mask_T`` is false have no turn, and any experts.
    """
    turn_T = torch.arange(num_tokens, device=device)
    if token_mask_T is not None:
        turn_T = (token_mask_T.cumsum(0) - 1).clamp(min=0)
    return (turn_T.unsqueeze(1) * top_k + torch.arange(top_k, device=device)) % num_experts
