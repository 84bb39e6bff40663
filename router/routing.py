"""One way to choose experts: the values of the choice, the choice, and the weights.

Legend: T tokens, E experts, K top_k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from router.config import ROUTING, RouterConfig, RoutingTraits
from router.scores import TINY


class Scored(NamedTuple):
    """What a choice is made from. No field has a gradient; no logit is NaN or infinite."""

    logits_TE: Tensor
    scores_TE: Tensor
    expert_bias_E: Tensor | None
    """Added to the scores for the choice; None without ``expert_bias``."""
    token_mask_T: Tensor | None
    """[T] bool, false for padding; None where all are tokens."""
    training: bool


class Routing(ABC):
    """A way to choose experts. A subclass says how a choice is made, and may replace other steps.

    A routing keeps no state between calls, for recomputation. ``moe.routing`` names a routing: by
    its line in :data:`router.config.ROUTINGS`, or as ``package.module:Class``. Each passes
    :class:`router.testing.RoutingContract`.
    """

    traits: ClassVar[RoutingTraits] = RoutingTraits()

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    def preferences(self, scored: Scored) -> Tensor:
        """[T, E] the values of the choice; minus infinity for experts that a token must not take.

        Capacity policies send an assignment that has no room to the token's next-best value.
        """
        if scored.expert_bias_E is not None:
            return scored.scores_TE + scored.expert_bias_E
        # Logits order as softmax scores do, and do not tie where those underflow.
        return scored.logits_TE if self.config.softmax_after_topk else scored.scores_TE

    @abstractmethod
    def choose(self, preferences_TE: Tensor, token_mask_T: Tensor | None) -> Tensor:
        """[T, K] int64, each token's experts, best first and none twice.

        Where experts choose (see the traits) [T, E]: column e is e where expert e takes the token,
        and E, which is no expert, elsewhere. What padding chooses does not matter.
        """

    def weights(
        self, logits_TE: Tensor, scores_TE: Tensor, expert_indices_TK: Tensor, gaps: bool
    ) -> Tensor:
        """[T, K] the weight of each chosen expert's output, with gradients; ``route_scale`` comes
        after. With ``gaps`` some indices may be E, which is no expert and gets a weight of 0."""
        E, c = self.config.num_experts, self.config
        nearest_TK = expert_indices_TK.clamp(max=E - 1)
        if c.softmax_after_topk:
            chosen_TK = logits_TE.gather(1, nearest_TK)
            if gaps:
                # Not minus infinity: the gradient of a token without experts would be NaN.
                nothing = torch.finfo(chosen_TK.dtype).min
                chosen_TK = chosen_TK.masked_fill(expert_indices_TK == E, nothing)
            return chosen_TK.softmax(-1)
        weights_TK = scores_TE.gather(1, nearest_TK)
        if gaps:
            weights_TK = weights_TK.masked_fill(expert_indices_TK == E, 0)
        return self.normalized(weights_TK)

    def normalized(self, weights_TK: Tensor) -> Tensor:
        """The weights, each token's scaled to a sum of 1 where ``norm_topk_prob`` says so."""
        if not self.config.norm_topk_prob:
            return weights_TK
        return weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(TINY)


def routing_of(config: RouterConfig) -> Routing:
    """The routing that ``config.routing`` names."""
    routing: Routing = ROUTING.load(config.routing)(config)
    return routing
