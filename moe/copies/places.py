"""The places of one call: where each routed token goes, once a plan of copies is made.

A place is an expert of a rank: one of the rank's own experts, or a copy. Ranks have equal blocks of
places, own experts first, so that a dispatcher sends to places as it sends to experts.

Legend: T tokens, K top_k, E experts, G ranks of the expert group, X experts with copies, P ranks
that compute an expert, N = T·K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe.copies.plan import CopyPlan, Units
from moe.rows import sort_by_expert
from router import RouterOutput, to_device


@dataclass(frozen=True)
class Places:
    """The places of one sending rank's rows."""

    rank: int
    per_rank: int
    """The places of each rank."""
    place_EP: Tensor
    """[E, P] int64 on the host: the places of each expert, the owner's first."""
    rows_EP: Tensor
    """[E, P] int64 on the host: the rows of this rank for each place; 0 where there is none."""

    @property
    def copied(self) -> int:
        """The rows for copies."""
        return int(self.rows_EP[:, 1:].sum())

    @property
    def total(self) -> int:
        """The places of all ranks, and the number that stands for none."""
        return self._ranks * self.per_rank

    @property
    def _ranks(self) -> int:
        return int(self.place_EP[-1, 0]) // self.per_rank + 1

    def routed(self, routed: RouterOutput) -> RouterOutput:
        """The routing with places for experts; the rows of an expert that has several places go to
        its places in the order of the tokens."""
        device = routed.expert_indices_TK.device
        rows = torch.zeros(self.total, dtype=torch.int64)
        rows.scatter_add_(0, self.place_EP.flatten(), self.rows_EP.flatten())
        return routed._replace(
            expert_indices_TK=self._of(routed.expert_indices_TK),
            rows_per_expert_E=to_device(rows, device),
        )

    def _of(self, indices_TK: Tensor) -> Tensor:
        device, E = indices_TK.device, len(self.place_EP)
        none = torch.tensor([self.total])
        if not self.copied:
            table = to_device(torch.cat([self.place_EP[:, 0], none]), device)
            return table[indices_TK]
        N = indices_TK.numel()
        rows = self.rows_EP.flatten()
        of_none = torch.tensor([N - int(rows.sum())])
        sorted_N = torch.repeat_interleave(
            to_device(torch.cat([self.place_EP.flatten(), none]), device),
            to_device(torch.cat([rows, of_none]), device),
            output_size=N,
        )
        order_N = sort_by_expert(indices_TK, E + 1)
        return torch.empty_like(sorted_N).index_copy_(0, order_N, sorted_N).view_as(indices_TK)


def places_of(plan: CopyPlan, counts_GE: Tensor, rank: int, units: Units | None = None) -> Places:
    """The places of the rows of a rank.

    Args:
        plan: the plan of the call, with at least one copy.
        counts_GE: [G, E] int64 on the host: the rows of each sending rank for each expert.
        rank: the sending rank, whose number of rows in ``counts_GE`` is met.
        units: which rank computes each unit; None where a unit may be divided.
    """
    experts, block = list(plan.rows), plan.block
    per_rank = block + plan.most_copies
    expert_E = torch.arange(plan.num_experts)
    own_E = expert_E // block * per_rank + expert_E % block
    longest = max(map(len, plan.rows.values()))
    place_EP = own_E.unsqueeze(1).repeat(1, longest)
    rows_EP = torch.zeros_like(place_EP)
    rows_EP[:, 0] = counts_GE[rank]
    numbers: list[int] = []  # one flat list: a tensor of nested lists takes longer
    for expert, by_rank in plan.rows.items():
        owner, *takers = by_rank
        own = owner * per_rank + expert % block
        copies = [t * per_rank + block + plan.copies[t].index(expert) for t in takers]
        missing = longest - len(by_rank)
        numbers += [*by_rank, *[owner] * missing, *by_rank.values(), *[0] * missing]
        numbers += [own, *copies, *[own] * missing]
    rank_XP, quota_XP, place_XP = torch.tensor(numbers).view(-1, 3, longest).unbind(1)
    expert_X = torch.tensor(experts)
    place_EP[expert_X] = place_XP
    if units is None:
        rows_EP[expert_X] = _divided(counts_GE[:, expert_X].t(), rank_XP, quota_XP, rank)
    else:
        mine_X1 = torch.tensor([[units[expert][rank]] for expert in experts])
        # Of an owner's column and those that fill a row up, only the first counts.
        mine_XP = rank_XP == mine_X1
        first_XP = mine_XP & (mine_XP.cumsum(1) == 1)
        rows_EP[expert_X] = first_XP * counts_GE[rank, expert_X].unsqueeze(1)
    return Places(rank, per_rank, place_EP, rows_EP)


def _divided(counts_XG: Tensor, rank_XP: Tensor, quota_XP: Tensor, rank: int) -> Tensor:
    """[X, P] the rows that ``rank`` sends to the ranks ``rank_XP``, which take ``quota_XP`` rows.

    A rank first computes its own rows, which then do not travel. The other rows of all senders, one
    sender after another, fill what is left of the ranks, one after another.
    """
    local_XP = torch.minimum(counts_XG.gather(1, rank_XP), quota_XP)
    others_XG = counts_XG.scatter_add(1, rank_XP, -local_XP)
    left_XP = quota_XP - local_XP
    ends_XP = left_XP.cumsum(1)
    begin_X1 = others_XG[:, :rank].sum(1, keepdim=True)
    end_X1 = begin_X1 + others_XG[:, rank : rank + 1]
    sent_XP = torch.minimum(ends_XP, end_X1) - torch.maximum(ends_XP - left_XP, begin_X1)
    return sent_XP.clamp_(min=0) + local_XP.masked_fill(rank_XP != rank, 0)
