"""Balancing one call: counts of all ranks, a plan, places for the rows, and the loans.

Legend: E experts, G ranks of the expert group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from moe.copies.loan import Lending
from moe.copies.places import places_of
from moe.copies.plan import plan_copies, whole_units
from parallel.comm import all_gather_rows
from router import HoldsGroups, HostRead, RouterOutput


class Copies(HoldsGroups):
    """Divides the rows of each call between the owners of experts and copies on other ranks.

    Plans are of exact counts: the numbers of a call's own tokens travel in one small all-gather
    before the tokens do, and the host waits for them. Nothing is kept between calls: in a
    recomputation equal routes give equal plans.

    Args:
        group: the ranks of the experts; every rank must call.
        most: the most copies of one rank.
        ranks_per_node: the consecutive ranks of one node; 0 where nodes are not known.
    """

    GROUPS = ("group",)

    def __init__(self, group: dist.ProcessGroup, most: int, ranks_per_node: int = 0) -> None:
        self.group, self.most, self.ranks_per_node = group, most, ranks_per_node
        self.keeps_units = False
        """Whether one rank computes all rows that a rank has for an expert, for exact sums."""

    def balanced(
        self, routed: RouterOutput, shares: Sequence[int] | None
    ) -> tuple[RouterOutput, Lending | None]:
        """The routing of a call with places for experts, and the loans; without copies the routing
        itself, and None.

        Args:
            routed: the routing of this rank's tokens.
            shares: [G] each rank's share of all rows, in any unit; None for equal shares.
        """
        counts = HostRead(all_gather_rows(routed.rows_per_expert_E, self.group, "ep"))
        counts_GE = counts.wait()
        rows_E: list[int] = counts_GE.sum(0).tolist()
        shares = [1] * self.group.size() if shares is None else shares
        plan, units = plan_copies(rows_E, shares, self.most, self.ranks_per_node), None
        if self.keeps_units and plan.num_copies:
            units_EG = {e: counts_GE[:, e].tolist() for e in plan.rows}
            plan, units = whole_units(plan, units_EG, rows_E, shares)
        if not plan.num_copies:
            return routed, None
        places = places_of(plan, counts_GE, self.group.rank(), units)
        return places.routed(routed), Lending.of(plan, rows_E, places.copied, self.group)
