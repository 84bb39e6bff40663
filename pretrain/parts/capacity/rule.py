"""Straggler-aware capacity of a run: plans from the speeds that ranks exchange each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel import Topology
from parallel.layout import count_ranks
from pretrain.errors import InputError
from router import (
    UNITS_PER_RANK,
    CapacityPlan,
    Numbers,
    RelativeSpeeds,
    StragglerAwareCapacity,
    StragglerAwareConfig,
    TopKRouter,
    in_groups,
    plan_for,
    speed_test,
)

Plans = list[list[int]]
"""For each expert group, in rank order, the units of each of its ranks."""


class CapacityBalance:
    """Measured speeds and capacity plans of all expert groups; every rank keeps equal copies.

    An expert group is ``ep`` consecutive ranks, which together hold every expert once. Plans change
    only at the step barrier.
    """

    def __init__(self, config: StragglerAwareConfig, topology: Topology) -> None:
        self.config, self.ranks_per_group = config, topology.ep
        groups = topology.world // topology.ep
        self.measured = RelativeSpeeds.start(topology.world, groups)
        """Speeds in assignments per second of expert compute."""
        self.in_force = [CapacityPlan.equal(topology.ep)] * groups
        self.recorded: Mapping[int, Plans] | None = None
        """Plans to take in the place of measured ones, by the step after which they hold."""

    def replay(self, recorded: Mapping[int, Plans], path: Path) -> None:
        """Take the plans that another run has logged, and measure none.

        Raises InputError where a plan is of other ranks, or is no plan.
        """
        like = [len(units) for units in self.plans]
        for step, plans in recorded.items():
            found = [len(units) for units in plans]
            if found != like:
                raise InputError(
                    f"moe.capacity.replay_log ({path}) must be of {len(like)} expert groups of "
                    f"{count_ranks(like[0])}; after step {step} it has {found}"
                )
            if any(min(units) < 1 or sum(units) != UNITS_PER_RANK * len(units) for units in plans):
                raise InputError(
                    f"moe.capacity.replay_log ({path}) must have positive units that sum to "
                    f"{UNITS_PER_RANK} a rank; after step {step} it has {plans}"
                )
        self.recorded = recorded

    @property
    def plans(self) -> Plans:
        """The plans in force."""
        return [list(plan.units) for plan in self.in_force]

    @property
    def shares(self) -> list[float]:
        """For each rank of the run, its planned work over the mean of its expert group."""
        return [share for plan in self.in_force for share in plan.shares]

    @property
    def relative_speeds(self) -> list[float]:
        """For each rank of the run, the median expert speed of its last 8 steps over the mean of
        its expert group; 1.0 for a rank without a measurement."""
        speeds = []
        for of_group in in_groups(self.measured.current, len(self.in_force)):
            known = [s for s in of_group if s is not None]
            mean = sum(known) / len(known) if known else 1.0
            speeds += [1.0 if s is None else s / mean for s in of_group]
        return speeds

    def after(self, step: int, rows: Numbers, seconds: Numbers) -> bool:
        """Take in what each rank's experts did in a committed step, in rank order.

        Args:
            step: the committed step.
            rows: routed tokens that each rank's experts computed.
            seconds: what each rank's experts took, waiting excluded.

        Returns:
            Whether plans change from here on.
        """
        before, n = self.in_force, self.ranks_per_group
        test = speed_test(self.config, n * len(before))
        self.measured = self.measured.after(rows, seconds, test)
        changed = {shift.rank // n for shift in self.measured.shifts}
        if changed:
            levels = in_groups(self.measured.levels, len(before))
            self.in_force = [
                plan_for(levels[i], self.config) if i in changed else plan
                for i, plan in enumerate(before)
            ]
        if self.recorded is not None:
            units = self.recorded.get(step)
            self.in_force = before
            if units is not None:
                self.set_plans(units)
        return self.in_force != before

    def set_plans(self, plans: Plans) -> None:
        """Let these plans hold from the next step on."""
        self.in_force = [CapacityPlan(tuple(units)) for units in plans]

    def apply(self, routers: Sequence[TopKRouter], rank: int) -> None:
        """Give this rank's routers the plan of this rank's expert group."""
        plan = self.in_force[rank // self.ranks_per_group]
        for router in routers:
            assert isinstance(router.capacity, StragglerAwareCapacity)
            router.capacity.plan = plan

    def state(self) -> dict[str, Any]:
        """Measured speeds and plans as plain JSON, for a checkpoint."""
        measured = in_groups(self.measured.state(), len(self.in_force))
        return {"measured": measured, "plans": self.plans}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned; the checkpoint must have this run's topology.

        A checkpoint of an earlier version has plans and no measurements that this version can use.
        Its plans hold until new measurements say otherwise.
        """
        self.set_plans(state["plans"])
        groups = len(self.in_force)
        if "measured" in state:
            ranks = [rank for group in state["measured"] for rank in group]
            self.measured = RelativeSpeeds.load(ranks, groups)
        else:
            self.measured = RelativeSpeeds.of_shares(*(plan.shares for plan in self.in_force))
