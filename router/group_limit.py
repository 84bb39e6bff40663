"""Group-limited choice: the experts of one token come from a few groups of experts.

Legend: T tokens, E experts, G groups, e experts of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
