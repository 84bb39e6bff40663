"""Capacity: how many assignments an expert or a rank takes, and what happens to the others.

Legend: T tokens, K top_k, E experts, B bins, N = T·K assignments in the order of tokens, then of k.
A bin is an expert or a rank, whichever the capacity is of.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from router.config import (
    CapacityConfig,
    DroplessConfig,
    FixedCapacityConfig,
    StragglerAwareConfig,
)
from router.groups import HoldsGroups
from router.placement import (
    Bins,
    Placement,
    as_outputs,
    keep_within,
    place,
    place_in_rounds,
    placement_shapes,
)
from router.plan import CapacityPlan, largest_remainder
from router.select import count_tokens_per_expert


class CapacityPolicy(Protocol):
    """Places the chosen assignments within a capacity."""

    def most(self, num_tokens: int) -> list[int] | None:
        """[E] the most assignments of each expert in a call of up to ``num_tokens`` tokens; None
        for no bound."""
        ...

    def place(
        self,
        expert_indices_TK: Tensor,
        choice_TE: Tensor,
        scores_TE: Tensor,
        training: bool = True,
        num_tokens: Tensor | None = None,
    ) -> Placement:
        """Place every assignment or drop it.

        Args:
            expert_indices_TK: [T, K] the chosen experts, no expert twice for a token; E stands for
                no expert.
            choice_TE: [T, E] the values of the choice; minus infinity for experts that a token must
                not take.
            scores_TE: [T, E] the scores; the lowest scores give way.
            training: whether the bounds on ranks apply; evaluation has no step to keep short.
            num_tokens: scalar int64, the tokens that a capacity is computed from, where some of
                the T rows are no tokens; None where all are.
        """
        ...

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """Set the ranks that hold the experts, in equal blocks."""
        ...


def _rank_bins(room_B: Tensor, num_experts: int) -> Bins:
    ranks = len(room_B)
    expert_E = torch.arange(num_experts, device=room_B.device)
    return Bins(expert_E // (num_experts // ranks), room_B)


class Dropless(HoldsGroups):
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

    def __init__(self, config: DroplessConfig) -> None:
        self.max_tokens_per_rank = config.max_tokens_per_rank
        self._group: dist.ProcessGroup | None = None

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """See :class:`CapacityPolicy`."""
        self._group = group

    def most(self, num_tokens: int) -> list[int] | None:
        """See :class:`CapacityPolicy`."""
        return None

    def place(
        self,
        expert_indices_TK: Tensor,
        choice_TE: Tensor,
        scores_TE: Tensor,
        training: bool = True,
        num_tokens: Tensor | None = None,
    ) -> Placement:
        """See :class:`CapacityPolicy`. With a bound, every rank of the group must call."""
        if self.max_tokens_per_rank:
            E = choice_TE.shape[1]
            bins = _rank_bins(self._room(expert_indices_TK, E), E)
            return place(expert_indices_TK, choice_TE, scores_TE, [bins])
        none = torch.zeros((), dtype=torch.int64, device=expert_indices_TK.device)
        return Placement(expert_indices_TK, None, none)

    def _room(self, expert_indices_TK: Tensor, num_experts: int) -> Tensor:
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


Tokens = TypeVar("Tokens", int, Tensor)
"""A number of tokens: an int, or a scalar int64 on its device."""


def expert_capacity(
    num_tokens: Tokens, top_k: int, num_experts: int, capacity_factor: float
) -> Tokens:
    """ceil(T·K / E · capacity_factor), exactly: 1.1 counts as 11/10 (GShard, arXiv 2006.16668)."""
    factor = Fraction(str(capacity_factor))
    return -(-num_tokens * top_k * factor.numerator // (num_experts * factor.denominator))


class FixedCapacity:
    """Each expert takes at most ceil(T·K / E · capacity_factor) of the T tokens of a call.

    ``drop_policy`` decides which assignments beyond the capacity give way. ``position`` keeps the
    first tokens. ``probs`` keeps the highest scores, and the earlier token where scores tie.
    ``reroute`` keeps the highest scores too, and sends each other assignment to the token's
    next-best expert with room. An assignment is dropped only where all experts are full that the
    token may take and does not have already.

    On an accelerator ``reroute`` waits for the device once a round. There are at most
    num_experts + top_k rounds, and usually two or three.
    """

    def __init__(self, config: FixedCapacityConfig, *, num_experts: int, top_k: int) -> None:
        self.config, self.num_experts, self.top_k = config, num_experts, top_k

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """See :class:`CapacityPolicy`; this policy does not depend on the group."""

    def most(self, num_tokens: int) -> list[int] | None:
        """See :class:`CapacityPolicy`."""
        return [self._room(num_tokens)] * self.num_experts

    def _room(self, num_tokens: Tokens) -> Tokens:
        factor = self.config.capacity_factor
        return expert_capacity(num_tokens, self.top_k, self.num_experts, factor)

    def place(
        self,
        expert_indices_TK: Tensor,
        choice_TE: Tensor,
        scores_TE: Tensor,
        training: bool = True,
        num_tokens: Tensor | None = None,
    ) -> Placement:
        """See :class:`CapacityPolicy`."""
        # shape[0] and not len(), which would fix the number in an exported graph.
        E, device = self.num_experts, choice_TE.device
        if num_tokens is None:
            room = self._room(expert_indices_TK.shape[0])
            # Filled there: a list that is copied to an accelerator would be waited for.
            room_E = torch.full((E,), room, dtype=torch.int64, device=device)
        else:
            room_E = self._room(num_tokens).expand(E)
        bins = Bins(torch.arange(E, device=device), room_E)
        if self.config.drop_policy == "reroute":
            return place(expert_indices_TK, choice_TE, scores_TE, [bins])
        priority_TK = None
        if self.config.drop_policy == "probs":
            priority_TK = scores_TE.gather(1, expert_indices_TK.clamp(max=E - 1))
        kept_TK = keep_within(expert_indices_TK, priority_TK, bins.room_B)
        none = torch.zeros((), dtype=torch.int64, device=choice_TE.device)
        return Placement(expert_indices_TK, ~kept_TK, none)


class StragglerAwareCapacity:
    """Each rank takes a share of a call's assignments by :class:`router.plan.CapacityPlan`.

    Of T tokens a rank takes its share of ceil(T·K · rank_capacity_factor) assignments. Each expert
    of the rank takes an equal part of the rank's share of T·K · capacity_factor, rounded up.
    Assignments beyond either bound go to the token's next-best expert with room, and are dropped
    only where no expert has room. Shares are equal until a plan is set, and without an expert
    group. Evaluation applies the bounds of experts and not the bounds of ranks: there is no
    training step that a slow rank could delay.
    """

    def __init__(self, config: StragglerAwareConfig, *, num_experts: int, top_k: int) -> None:
        self.config, self.num_experts, self.top_k = config, num_experts, top_k
        self._factors = config.capacity_factor, config.rank_capacity_factor
        self.plan = CapacityPlan.equal(1)

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """See :class:`CapacityPolicy`; a plan for as many ranks stays."""
        if len(self.plan.units) != group.size():
            self.plan = CapacityPlan.equal(group.size())

    def most(self, num_tokens: int) -> list[int] | None:
        """See :class:`CapacityPolicy`."""
        return list(self.rooms(num_tokens)[0])

    def rooms(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The most assignments of each expert, and of each rank, in a call."""
        assignments = num_tokens * self.top_k
        return _rooms(self._factors, self.plan.units, assignments, self.num_experts)

    def place(
        self,
        expert_indices_TK: Tensor,
        choice_TE: Tensor,
        scores_TE: Tensor,
        training: bool = True,
        num_tokens: Tensor | None = None,
    ) -> Placement:
        """See :class:`CapacityPolicy`."""
        args = (
            expert_indices_TK, choice_TE, scores_TE, self.plan.units, *self._factors, training,
            num_tokens,
        )  # fmt: skip
        if torch.compiler.is_compiling():
            # One operator, as in place(); with the rooms, as the number of tokens may be a symbol.
            return Placement(*torch.ops.convoy.place_by_plan(*args))
        return _place_by_plan(*args)


def _place_by_plan(
    chosen_TK: Tensor,
    choice_TE: Tensor,
    scores_TE: Tensor,
    units: Sequence[int],
    capacity_factor: float,
    rank_capacity_factor: float,
    training: bool,
    num_tokens: Tensor | None = None,
) -> Placement:
    device, E = choice_TE.device, choice_TE.shape[1]
    factors = capacity_factor, rank_capacity_factor
    # int() waits for an accelerator, as each round of place_in_rounds does.
    T = chosen_TK.shape[0] if num_tokens is None else int(num_tokens)
    experts, ranks = _rooms(factors, tuple(units), T * chosen_TK.shape[1], E)
    bins = [Bins(torch.arange(E, device=device), torch.tensor(experts, device=device))]
    if training:
        bins.append(_rank_bins(torch.tensor(ranks, device=device), E))
    return place_in_rounds(chosen_TK, choice_TE, scores_TE, bins)


@lru_cache(maxsize=64)
def _rooms(
    factors: tuple[float, float], units: tuple[int, ...], assignments: int, num_experts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    def total(factor: float) -> int:
        return expert_capacity(assignments, 1, 1, factor)

    per_rank = num_experts // len(units)
    all_units = sum(units) * per_rank
    # Rounded up: an expert has room for at least one token, however few tokens there are.
    per_expert = [-(-total(factors[0]) * u // all_units) for u in units]
    ranks = largest_remainder(total(factors[1]), tuple(Fraction(u) for u in units))
    return tuple(n for n in per_expert for _ in range(per_rank)), tuple(ranks)


torch.library.custom_op(
    "convoy::place_by_plan",
    lambda *args: as_outputs(_place_by_plan(*args)),
    mutates_args=(),
    schema="(Tensor chosen_TK, Tensor choice_TE, Tensor scores_TE, int[] units, "
    "float capacity_factor, float rank_capacity_factor, bool training, Tensor? num_tokens=None) -> "
    "(Tensor, Tensor, Tensor)",
).register_fake(placement_shapes)


def capacity_policy(config: CapacityConfig, *, num_experts: int, top_k: int) -> CapacityPolicy:
    """The policy that a config describes, for ``num_experts`` experts and ``top_k`` choices."""
    if isinstance(config, FixedCapacityConfig):
        return FixedCapacity(config, num_experts=num_experts, top_k=top_k)
    if isinstance(config, StragglerAwareConfig):
        return StragglerAwareCapacity(config, num_experts=num_experts, top_k=top_k)
    return Dropless(config)
