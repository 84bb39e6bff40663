"""The capacity policy ``straggler_aware``: a rank takes assignments in proportion to its speed.

Legend: T tokens, K top_k, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from router.capacity import Assignments, CapacityPolicy, expert_capacity
from router.config import CAPACITIES, StragglerAwareConfig
from router.host import to_device
from router.placement import (
    Bins,
    Placement,
    as_chosen,
    as_outputs,
    place_in_rounds,
    placement_shapes,
    rank_bins,
)
from router.plan import CapacityPlan, largest_remainder


class StragglerAwareCapacity(CapacityPolicy):
    """Each rank takes a share of a call's assignments by :class:`router.plan.CapacityPlan`.

    Of T tokens a rank takes its share of T·K assignments. Each expert
    of the rank takes an equal part of the rank's share of T·K · capacity_factor, rounded up.
    Assignments beyond either bound go to the token's next-best expert with room, and are dropped
    only where no expert has room. Shares are equal until a plan is set, and without an expert
    group. Evaluation applies the bounds of experts and not the bounds of ranks: there is no
    training step that a slow rank could delay. With copies of experts no assignment is moved or
    dropped: copies take what is beyond a rank's share.
    """

    traits = CAPACITIES["straggler_aware"]

    def __init__(self, config: StragglerAwareConfig, *, num_experts: int, top_k: int) -> None:
        super().__init__(config, num_experts=num_experts, top_k=top_k)
        self._factor = config.capacity_factor
        self.plan = CapacityPlan.equal(1)

    def use_expert_group(self, group: dist.ProcessGroup) -> None:
        """See :class:`CapacityPolicy`; a plan for as many ranks stays."""
        if len(self.plan.units) != group.size():
            self.plan = CapacityPlan.equal(group.size())

    @property
    def shares(self) -> Sequence[int]:
        """See :class:`CapacityPolicy`."""
        return self.plan.units

    def max_assignments_per_expert(self, num_tokens: int) -> list[int] | None:
        """See :class:`CapacityPolicy`."""
        if self.has_copies:
            return None
        return list(self.capacities(num_tokens)[0])

    def capacities(self, num_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The most assignments of each expert, and of each rank, in a call."""
        assignments = num_tokens * self.top_k
        return _capacities(self._factor, self.plan.units, assignments, self.num_experts)

    def placed(self, asked: Assignments) -> Placement:
        """See :class:`CapacityPolicy`."""
        if self.has_copies:
            return as_chosen(asked.expert_indices_TK)
        arguments = (
            asked.expert_indices_TK, asked.choice_TE, asked.scores_TE, self.plan.units,
            self._factor, asked.training, asked.num_tokens,
        )  # fmt: skip
        if torch.compiler.is_compiling():
            # One operator, as in place(); it computes the capacities too, as the number of tokens
            # may be a symbol.
            return Placement(*torch.ops.convoy.place_by_plan(*arguments))
        return _place_by_plan(*arguments)


def _place_by_plan(
    chosen_TK: Tensor,
    choice_TE: Tensor,
    scores_TE: Tensor,
    units: Sequence[int],
    capacity_factor: float,
    training: bool,
    num_tokens: Tensor | None = None,
) -> Placement:
    device, E = choice_TE.device, choice_TE.shape[1]
    # int() waits for an accelerator, as each round of place_in_rounds does.
    T = chosen_TK.shape[0] if num_tokens is None else int(num_tokens)
    experts, ranks = _capacities(capacity_factor, tuple(units), T * chosen_TK.shape[1], E)
    bins = [Bins(torch.arange(E, device=device), to_device(experts, device))]
    if training:
        bins.append(rank_bins(to_device(ranks, device), E))
    return place_in_rounds(chosen_TK, choice_TE, scores_TE, bins)


@lru_cache(maxsize=64)
def _capacities(
    factor: float, units: tuple[int, ...], assignments: int, num_experts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    per_rank, total = num_experts // len(units), expert_capacity(assignments, 1, 1, factor)
    all_units = sum(units) * per_rank
    # Rounded up: an expert takes at least one token, however few tokens there are.
    per_expert = [-(-total * u // all_units) for u in units]
    ranks = largest_remainder(assignments, tuple(Fraction(u) for u in units))
    return tuple(n for n in per_expert for _ in range(per_rank)), tuple(ranks)


torch.library.custom_op(
    "convoy::place_by_plan",
    lambda *args: as_outputs(_place_by_plan(*args)),
    mutates_args=(),
    schema="(Tensor chosen_TK, Tensor choice_TE, Tensor scores_TE, int[] units, "
    "float capacity_factor, bool training, Tensor? num_tokens=None) -> "
    "(Tensor, Tensor, Tensor)",
).register_fake(placement_shapes)
