"""The routing ``expert_choice``: each expert takes the tokens that score highest for the expert.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from router.config import ROUTINGS
from router.routing import Routing


class ExpertChoice(Routing):
    """Each expert takes its best tokens; a token may get no expert, or all."""

    traits = ROUTINGS["expert_choice"]

    def choose(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
        """[T, E]: each expert takes the ceil(T·K / E) tokens that score highest for it, earlier
        ones on a tie; see :class:`router.routing.Routing`.

        Zhou et al., arXiv 2202.09368, section 3.2, with their capacity factor c = K. The choice
        looks at all T tokens: in a causal model it lets a token depend on later ones. With a mask T
        counts the tokens where ``token_mask_T`` is true, and no expert takes another.
        """
        T, E = preferences_TE.shape
        K, device = self.config.top_k, preferences_TE.device
        taken_TE = torch.zeros_like(preferences_TE, dtype=torch.bool)
        if token_mask_T is None:
            takes = min(-(-T * K // E), T)
            best = preferences_TE.argsort(dim=0, descending=True, stable=True)[:takes]
            taken_TE = taken_TE.scatter_(0, best, True)
        else:
            masked_TE = preferences_TE.masked_fill(~token_mask_T.unsqueeze(1), -torch.inf)
            order_TE = masked_TE.argsort(dim=0, descending=True, stable=True)
            # The number of tokens stays on the device: a copy to the host would wait.
            num_tokens = token_mask_T.sum()
            takes_1 = torch.minimum(-(-num_tokens * K // E), num_tokens)
            rank_T1 = torch.arange(T, device=device).unsqueeze(1)
            taken_TE = taken_TE.scatter_(0, order_TE, (rank_T1 < takes_1).expand(T, E))
            taken_TE = taken_TE & token_mask_T.unsqueeze(1)
        return torch.where(taken_TE, torch.arange(E, device=device), E)

    def weights(
        self, logits_TE: Tensor, scores_TE: Tensor, expert_indices_TK: Tensor, gaps: bool
    ) -> Tensor:
        """See :class:`router.routing.Routing`: [T, E], 0 where an expert did not choose."""
        return self.normalized(scores_TE * (expert_indices_TK < self.config.num_experts))
