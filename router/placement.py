"""Placing assignments in bins of limited room: which stay, which move, which are dropped.

Legend: T tokens, K top_k, E experts, B bins. A bin is an expert or a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from router.host import HostRead
from router.scores import count_tokens_per_expert


class Placement(NamedTuple):
    """The expert of every assignment after capacity. No field has a gradient."""

    expert_indices_TK: Tensor
    """[T, K] int64; a dropped assignment keeps the expert that was chosen."""
    dropped_TK: Tensor | None
    """[T, K] bool; None where the policy drops nothing, which spares waiting for an accelerator."""
    num_rerouted: Tensor
    """Scalar int64: assignments that were moved to another expert than the chosen one."""


def as_chosen(chosen_TK: Tensor) -> Placement:
    """Every assignment stays where it was chosen."""
    none = torch.zeros((), dtype=torch.int64, device=chosen_TK.device)
    return Placement(chosen_TK, None, none)


class Bins(NamedTuple):
    """The bins of one level of capacity: single experts, or all experts of a rank."""

    of_expert_E: Tensor
    """[E] int64, the bin of each expert."""
    room_B: Tensor
    """[B] int64, the most assignments of each bin."""


def rank_bins(room_B: Tensor, num_experts: int) -> Bins:
    """The bins of a level of ranks, which hold equal blocks of experts in their order."""
    ranks = len(room_B)
    expert_E = torch.arange(num_experts, device=room_B.device)
    return Bins(expert_E // (num_experts // ranks), room_B)


def keep_within(bins: Tensor, priority: Tensor | None, room_B: Tensor) -> Tensor:
    """Which assignments fit into their bins.

    Args:
        bins: the bin of each assignment, int64, of any shape; B stands for no bin, and such an
            assignment is never kept.
        priority: of the shape of ``bins``. The highest priorities are kept, and the earlier
            assignment where priorities tie; None keeps the earlier assignments.
        room_B: [B] int64, the most assignments of each bin.

    Returns:
        bool, of the shape of ``bins``.
    """
    flat = bins.flatten()
    order = torch.arange(flat.numel(), device=flat.device)
    if priority is not None:
        order = priority.flatten().argsort(descending=True, stable=True)
    order = order[flat[order].argsort(stable=True)]
    binned = flat[order]
    counts = count_tokens_per_expert(flat, room_B.numel() + 1)
    first = counts.cumsum(0) - counts
    place = torch.arange(flat.numel(), device=flat.device) - first[binned]
    room = torch.cat([room_B, room_B.new_zeros(1)])
    kept = torch.empty_like(flat, dtype=torch.bool)
    kept[order] = place < room[binned]
    return kept.view(bins.shape)


def _fit(
    asked_TK: Tensor, scores_TE: Tensor, levels: Sequence[Bins], room: Sequence[Tensor]
) -> Tensor:
    """[T, K] bool: which requested experts (E for no expert) have room on every level."""
    E = scores_TE.shape[1]
    priority_TK = scores_TE.gather(1, asked_TK.clamp(max=E - 1))
    kept_TK = asked_TK < E
    for level, room_B in zip(levels, room, strict=True):
        bins_TK = level.of_expert_E[asked_TK.clamp(max=E - 1)].masked_fill(~kept_TK, len(room_B))
        kept_TK = keep_within(bins_TK, priority_TK, room_B)
    return kept_TK


def _room_left(indices_TK: Tensor, kept_TK: Tensor, level: Bins) -> Tensor:
    B = len(level.room_B)
    nearest_TK = indices_TK.clamp(max=len(level.of_expert_E) - 1)  # E is none, and not kept
    bins_TK = level.of_expert_E[nearest_TK].masked_fill(~kept_TK, B)
    return level.room_B - count_tokens_per_expert(bins_TK, B + 1)[:B]


def place(
    chosen_TK: Tensor, choice_TE: Tensor, scores_TE: Tensor, levels: Sequence[Bins]
) -> Placement:
    """Keep the highest scores within every level's capacity, and move the others to free
    experts."""
    if torch.compiler.is_compiling():
        # How many rounds there are is data, which a compiler cannot trace: one operator.
        experts, room = [level.of_expert_E for level in levels], [level.room_B for level in levels]
        return Placement(*torch.ops.convoy.place(chosen_TK, choice_TE, scores_TE, experts, room))
    return place_in_rounds(chosen_TK, choice_TE, scores_TE, levels)


def place_in_rounds(
    chosen_TK: Tensor, choice_TE: Tensor, scores_TE: Tensor, levels: Sequence[Bins]
) -> Placement:
    """As :func:`place`, in eager mode."""
    E = choice_TE.shape[1]
    indices_TK = chosen_TK
    kept_TK = _fit(chosen_TK, scores_TE, levels, [level.room_B for level in levels])
    waiting_TK = ~kept_TK & (chosen_TK < E)
    rerouted = torch.zeros((), dtype=torch.int64, device=choice_TE.device)
    # An accelerator is a round ahead of the host. A round in which no assignment waits changes
    # nothing.
    asked = deque([HostRead(waiting_TK.any())])
    ahead = 0 if choice_TE.device.type == "cpu" else 1
    while len(asked) <= ahead or bool(asked.popleft().wait()):
        room = [_room_left(indices_TK, kept_TK, level) for level in levels]
        full_E = torch.zeros(E, dtype=torch.bool, device=choice_TE.device)
        for level, room_B in zip(levels, room, strict=True):
            full_E = full_E | (room_B <= 0)[level.of_expert_E]
        # A token must not take an expert twice. A rejected choice need not be remembered: only a
        # full expert or a full rank rejects a choice.
        taken_TE = torch.zeros(len(choice_TE), E + 1, dtype=torch.bool, device=choice_TE.device)
        taken_TE = taken_TE.scatter_(1, indices_TK, kept_TK)[:, :E]
        best_T = choice_TE.masked_fill(taken_TE | full_E, -torch.inf).max(-1)
        # One assignment of a token asks at a time, or two of them might take the same expert.
        asks_TK = waiting_TK & (waiting_TK.cumsum(1) == 1)
        hopeless_T = best_T.values == -torch.inf
        waiting_TK = waiting_TK & ~hopeless_T.unsqueeze(1)
        asks_TK = asks_TK & ~hopeless_T.unsqueeze(1)
        asked_TK = torch.where(asks_TK, best_T.indices.unsqueeze(1), E)
        won_TK = _fit(asked_TK, scores_TE, levels, room)
        indices_TK = torch.where(won_TK, asked_TK, indices_TK)
        kept_TK, waiting_TK = kept_TK | won_TK, waiting_TK & ~won_TK
        rerouted = rerouted + won_TK.sum()
        asked.append(HostRead(waiting_TK.any()))
    return Placement(torch.where(kept_TK, indices_TK, chosen_TK), ~kept_TK, rerouted)


def _place_kernel(
    chosen_TK: Tensor,
    choice_TE: Tensor,
    scores_TE: Tensor,
    experts: Sequence[Tensor],
    room: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    placed = place_in_rounds(chosen_TK, choice_TE, scores_TE, list(map(Bins, experts, room)))
    return as_outputs(placed)


def as_outputs(placed: Placement) -> tuple[Tensor, Tensor, Tensor]:
    """What an operator of torch.library gives: a tuple of tensors."""
    assert placed.dropped_TK is not None
    return placed.expert_indices_TK, placed.dropped_TK, placed.num_rerouted


def placement_shapes(chosen_TK: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`as_outputs` without values, for a compiler."""
    dropped_TK = torch.empty_like(chosen_TK, dtype=torch.bool)
    return torch.empty_like(chosen_TK), dropped_TK, chosen_TK.new_empty(())


torch.library.custom_op(
    "convoy::place",
    _place_kernel,
    mutates_args=(),
    schema="(Tensor chosen_TK, Tensor choice_TE, Tensor scores_TE, Tensor[] experts, "
    "Tensor[] room) -> (Tensor, Tensor, Tensor)",
).register_fake(placement_shapes)
