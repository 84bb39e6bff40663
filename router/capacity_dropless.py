"""The capacity policy ``dropless``: all that is chosen is computed, within a bound on ranks if any.

Legend: T tokens, K top_k, E experts, R ranks received by, S ranks sent from.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from router.capacity import Assignments, CapacityPolicy
from router.config import CAPACITIES, DroplessConfig
from router.groups import HoldsGroups
from router.placement import Placement, as_chosen, place, rank_bins
from router.scores import count_tokens_per_expert


class Dropless(HoldsGroups, CapacityPolicy):
    """Every expert computes all assignments that choose the expert.

    In the worst case all tokens of all ranks of the group choose the experts of one rank, which
    then computes T · min(K, experts of the rank) assignments for each rank's T tokens.
    ``max_tokens_per_rank`` bounds this number. Where a rank would exceed the bound, each sender
    gets a part of the rank's capacity in proportion to the number of assignments that the sender
    has for the rank. The other assignments go to next-best experts of ranks with capacity left,
    which is divided in proportion to these assignments. The counts cost one small all-gather a
    layer. A bound slightly above the group's mean of T·K drops nothing; a lower bound drops what no
    rank can take.
    """

    GROUPS = ("_group",)

    traits = CAPACITIES["dropless"]

    def __init__(self, config: DroplessConfig, *, num_experts: int = 0, top_k: int = 0) -> None:
        super().__init__(config, num_experts=num_experts, top_k=top_k)
        self.max_tokens_per_rank = config.max_tokens_per_rank
        self._group: dist.ProcessGroup | None = None

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """See :class:`CapacityPolicy`."""
        self._group = group

    def placed(self, asked: Assignments) -> Placement:
        """See :class:`CapacityPolicy`. With a bound, every rank of the group must call."""
        chosen_TK, E = asked.expert_indices_TK, asked.choice_TE.shape[1]
        if self.max_tokens_per_rank:
            bins = rank_bins(self._capacity_of_ranks(chosen_TK, E), E)
            return place(chosen_TK, asked.choice_TE, asked.scores_TE, [bins])
        return as_chosen(chosen_TK)

    def _capacity_of_ranks(self, expert_indices_TK: Tensor, num_experts: int) -> Tensor:
        """[ranks] int64: the most assignments that this rank may send to each rank."""
        most = self.max_tokens_per_rank
        counts_E = count_tokens_per_expert(expert_indices_TK, num_experts + 1)[:num_experts]
        if self._group is None or self._group.size() == 1:
            return counts_E.sum().clamp(max=most).unsqueeze(0)
        sent = counts_E.view(self._group.size(), -1).sum(1)
        gathered = [torch.empty_like(sent) for _ in range(self._group.size())]
        dist.all_gather(gathered, sent, group=self._group)
        sent_SR = torch.stack(gathered)  # by rank sent from, by rank sent to
        total_R = sent_SR.sum(0)
        room_SR = torch.where(total_R > most, _portions(total_R.clamp(max=most), sent_SR), sent_SR)
        over_S = (sent_SR - room_SR).sum(1)
        room_SR = room_SR + _portions(most - total_R.clamp(max=most), over_S.unsqueeze(1))
        return room_SR[self._group.rank()]


def _portions(whole_R: Tensor, weights_SR: Tensor) -> Tensor:
    """Divide each whole number in proportion to a column of weights, into integers whose sum is the
    whole number."""
    ends_SR = weights_SR.cumsum(0)
    ends_SR = whole_R * ends_SR // ends_SR[-1].clamp(min=1)
    return ends_SR.diff(dim=0, prepend=torch.zeros_like(ends_SR[:1]))
