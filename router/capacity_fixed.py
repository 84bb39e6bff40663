"""The capacity policy ``fixed``: every expert takes an equal number of assignments.

Legend: T tokens, K top_k, E experts.
"""

from __future__ import annotations

import torch

from router.capacity import Assignments, CapacityPolicy, Tokens, expert_capacity
from router.config import CAPACITIES, FixedCapacityConfig
from router.placement import Bins, Placement, keep_within, place


class FixedCapacity(CapacityPolicy):
    """Each expert takes at most ceil(T·K / E · capacity_factor) of the T tokens of a call.

    ``drop_policy`` decides which assignments beyond the capacity give way. ``position`` keeps the
    first tokens. ``probs`` keeps the highest scores, and the earlier token where scores tie.
    ``reroute`` keeps the highest scores too, and sends each other assignment to the token's
    next-best expert with room. An assignment is dropped only where all experts are full that the
    token may take and does not have already.

    On an accelerator ``reroute`` waits for the device once a round. There are at most
    num_experts + top_k rounds, and usually two or three.
    """

    traits = CAPACITIES["fixed"]
    config: FixedCapacityConfig

    def max_assignments_per_expert(self, num_tokens: int) -> list[int] | None:
        """See :class:`CapacityPolicy`."""
        return [self._capacity(num_tokens)] * self.num_experts

    def _capacity(self, num_tokens: Tokens) -> Tokens:
        factor = self.config.capacity_factor
        return expert_capacity(num_tokens, self.top_k, self.num_experts, factor)

    def placed(self, asked: Assignments) -> Placement:
        """See :class:`CapacityPolicy`."""
        # shape[0] and not len(), which would fix the number in an exported graph.
        chosen_TK, choice_TE, scores_TE, _, num_tokens = asked
        E, device = self.num_experts, choice_TE.device
        if num_tokens is None:
            capacity = self._capacity(chosen_TK.shape[0])
            # Filled there: a list that is copied to an accelerator would be waited for.
            capacity_E = torch.full((E,), capacity, dtype=torch.int64, device=device)
        else:
            capacity_E = self._capacity(num_tokens).expand(E)
        bins = Bins(torch.arange(E, device=device), capacity_E)
        if self.config.drop_policy == "reroute":
            return place(chosen_TK, choice_TE, scores_TE, [bins])
        priority_TK = None
        if self.config.drop_policy == "probs":
            priority_TK = scores_TE.gather(1, chosen_TK.clamp(max=E - 1))
        kept_TK = keep_within(chosen_TK, priority_TK, capacity_E)
        none = torch.zeros((), dtype=torch.int64, device=device)
        return Placement(chosen_TK, ~kept_TK, none)
