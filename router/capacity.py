"""How many rows an expert takes, and what becomes of those over it.

Legend: T tokens, K top_k, E experts, N = T·K assignments in the order of tokens, then of k.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from router.config import RouterConfig
from router.select import count_tokens_per_expert


class Placement(NamedTuple):
    """Where assignments end up. Discrete: nothing here has a gradient."""

    expert_indices_TK: Tensor
    """[T, K] int64; a dropped assignment keeps the expert that was chosen."""
    dropped_TK: Tensor | None
    """[T, K] bool; None where nothing can be dropped, and no device need be waited for."""
    num_rerouted: Tensor
    """Scalar int64: assignments that took another expert than the chosen one."""


class CapacityPolicy(Protocol):
    """Fits choices to the room there is."""

    def place(self, expert_indices_TK: Tensor, choice_TE: Tensor, scores_TE: Tensor) -> Placement:
        """Place every assignment or drop it.

        Args:
            expert_indices_TK: [T, K] the chosen experts, no expert twice for a token.
            choice_TE: [T, E] what they were chosen by; minus infinity for experts out of reach.
            scores_TE: [T, E] the scores that decide who gives way.
        """
        ...


class Dropless:
    """Every expert takes what comes."""

    def place(self, expert_indices_TK: Tensor, choice_TE: Tensor, scores_TE: Tensor) -> Placement:
        """See :class:`CapacityPolicy`."""
        none = torch.zeros((), dtype=torch.int64, device=expert_indices_TK.device)
        return Placement(expert_indices_TK, None, none)


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, capacity_factor: float) -> int:
    """ceil(T·K / E · capacity_factor), exactly: 1.1 counts as 11/10 (GShard, arXiv 2006.16668)."""
    return math.ceil(Fraction(num_tokens * top_k, num_experts) * Fraction(str(capacity_factor)))


class FixedCapacity:
    """Each expert takes ceil(T·K / E · capacity_factor) of the T tokens of a call.

    Over that, assignments give way by ``overflow``: ``drop_by_position`` keeps the first come,
    ``drop_by_score`` the highest scores, earlier tokens first where those tie; ``reroute`` keeps
    the highest scores and sends the others to their next-best expert with room, so that one is
    dropped only if every expert it can reach, and that its token does not have already, is full.

    On an accelerator ``reroute`` waits for the device once a round; there are as many rounds as
    experts fill up one after another, at most num_experts + top_k, and commonly two or three.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config

    def place(self, expert_indices_TK: Tensor, choice_TE: Tensor, scores_TE: Tensor) -> Placement:
        """See :class:`CapacityPolicy`."""
        T, K = expert_indices_TK.shape
        E = choice_TE.shape[1]
        capacity = expert_capacity(T, K, E, self.config.capacity_factor)
        priority_TK = None
        if self.config.overflow != "drop_by_position":
            priority_TK = scores_TE.gather(1, expert_indices_TK)
        room_E = torch.full((E,), capacity, dtype=torch.int64, device=choice_TE.device)
        kept_TK = keep_within(expert_indices_TK, priority_TK, room_E)
        if self.config.overflow == "reroute":
            return _reroute(expert_indices_TK, choice_TE, scores_TE, kept_TK, room_E)
        none = torch.zeros((), dtype=torch.int64, device=choice_TE.device)
        return Placement(expert_indices_TK, ~kept_TK, none)


def keep_within(expert_indices: Tensor, priority: Tensor | None, room_E: Tensor) -> Tensor:
    """Which assignments their expert has room for.

    Args:
        expert_indices: any shape, int64; E stands for none and is never kept.
        priority: of the same shape; the highest are kept, earlier ones first where they tie, or
            with None simply the earlier.
        room_E: [E] int64.

    Returns:
        bool, of the same shape.
    """
    flat = expert_indices.flatten()
    order = torch.arange(flat.numel(), device=flat.device)
    if priority is not None:
        order = priority.flatten().argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]
    experts = flat[order]
    E = room_E.numel()
    counts = count_tokens_per_expert(flat, E + 1)
    first = counts.cumsum(0) - counts
    place = torch.arange(flat.numel(), device=flat.device) - first[experts]
    room = torch.cat([room_E, room_E.new_zeros(1)])
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = place < room[experts]
    return kept.view(expert_indices.shape)


def _reroute(
    chosen_TK: Tensor, choice_TE: Tensor, scores_TE: Tensor, kept_TK: Tensor, capacity_E: Tensor
) -> Placement:
    E = choice_TE.shape[1]
    indices_TK, kept_TK = chosen_TK.clone(), kept_TK.clone()
    waiting_TK = ~kept_TK
    rerouted = torch.zeros((), dtype=torch.int64, device=choice_TE.device)
    while bool(waiting_TK.any()):
        there_TK = indices_TK.masked_fill(~kept_TK, E)
        room_E = capacity_E - count_tokens_per_expert(there_TK, E + 1)[:E]
        # An expert is out of reach for a token that has it already. A rejected choice need not be
        # remembered: who was turned away was turned away by a full expert.
        taken_TE = torch.zeros_like(choice_TE, dtype=torch.bool)
        taken_TE.scatter_(1, indices_TK, kept_TK)
        reach_TE = choice_TE.masked_fill(taken_TE | (room_E <= 0), -torch.inf)
        best_T = reach_TE.max(-1)
        # One assignment of a token asks at a time, or two of them might take the same expert.
        asks_TK = waiting_TK & (waiting_TK.cumsum(1) == 1)
        hopeless_T = best_T.values == -torch.inf
        waiting_TK = waiting_TK & ~hopeless_T.unsqueeze(1)
        asks_TK = asks_TK & ~hopeless_T.unsqueeze(1)
        asked_TK = torch.where(asks_TK, best_T.indices.unsqueeze(1), E)
        priority_TK = scores_TE.gather(1, asked_TK.clamp(max=E - 1))
        won_TK = keep_within(asked_TK, priority_TK, room_E)
        indices_TK = torch.where(won_TK, asked_TK, indices_TK)
        kept_TK, waiting_TK = kept_TK | won_TK, waiting_TK & ~won_TK
        rerouted = rerouted + won_TK.sum()
    return Placement(torch.where(kept_TK, indices_TK, chosen_TK), ~kept_TK, rerouted)


def capacity_policy(config: RouterConfig) -> CapacityPolicy:
    """The policy of a config."""
    return Dropless() if config.capacity_policy == "dropless" else FixedCapacity(config)
