"""The routing ``top_k``: each token takes its best experts.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

from torch import Tensor

from router.config import ROUTINGS
from router.group_limit import limit_to_groups
from router.routing import Routing, Scored
from router.select import select_top_k


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
        return select_top_k(preferences_TE, self.config.top_k)
