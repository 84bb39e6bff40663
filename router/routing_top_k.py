"""The routing ``top_k``: each token takes its best experts, or those of a few groups of experts.

Legend: T tokens, E experts, K top_k, G groups, e experts of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.config import ROUTINGS
from router.routing import Routing, Scored


class TopK(Routing):
    """Each token takes the ``top_k`` experts that it prefers, within its best groups of experts."""

    traits = ROUTINGS["top_k"]

    def preferences(self, scored: Scored) -> Tensor:
        """See :class:`router.routing.Routing`; minus infinity outside a token's best groups."""
        c, preferences_TE = self.config, super().preferences(scored)
        if c.n_groups == 1:
            return preferences_TE
        return limit_to_groups(preferences_TE, c.n_groups, c.topk_groups, c.topk_per_group)

    def choose(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
        """See :class:`router.routing.Routing`."""
        return preferences_TE.topk(self.config.top_k, dim=-1).indices


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
