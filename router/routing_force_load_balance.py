"""The routing ``force_load_balance``: experts in turn, whatever their scores; for benchmarks.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from router.config import ROUTINGS, RouterConfig
from router.routing import Routing


class ForceLoadBalance(Routing):
    """Experts in turn. A router that is trained so learns nothing about the choice."""

    traits = ROUTINGS["force_load_balance"]

    def __init__(self, config: RouterConfig) -> None:
        super().__init__(config)
        warnings.warn(
            "routing is force_load_balance: tokens go to experts in turn, whatever their "
            "scores; this is for benchmarks and does not train a router",
            stacklevel=4,  # where the router is made
        )

    def choose(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
        """[T, K]: experts in turn; the counts of experts differ by at most one. Padding has no
        turn, and any experts."""
        (T, E), K, device = preferences_TE.shape, self.config.top_k, preferences_TE.device
        turn_T = torch.arange(T, device=device)
        if token_mask_T is not None:
            turn_T = (token_mask_T.cumsum(0) - 1).clamp(min=0)
        return (turn_T.unsqueeze(1) * K + torch.arange(K, device=device)) % E
