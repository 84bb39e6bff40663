"""Straggler-aware capacity of a run: measured at the barrier, alike on every rank, replayable."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel import Topology
from pretrain.errors import InputError
from router import (
    UNITS_PER_RANK,
    Balance,
    CapacityPlan,
    RouterConfig,
    StragglerAwareCapacity,
    TopKRouter,
)

Plans = list[list[int]]
"""For each expert group, in rank order, the units of each of its ranks."""


class CapacityBalance:
    """Speeds and plans of all expert groups; every rank keeps them all, and they are the same.

    A group is ``ep`` consecutive ranks, which hold all experts once. Plans change at the barrier
    alone.
    """

    def __init__(self, config: RouterConfig, topology: Topology, replay: Path | None) -> None:
        self.config, self.ranks_per_group = config, topology.ep
        self.groups = [Balance.start(topology.ep) for _ in range(topology.world // topology.ep)]
        self.recorded = None if replay is None else read_plans(replay, self.plans)

    @property
    def plans(self) -> Plans:
        """Those in force."""
        return [list(group.plan.units) for group in self.groups]

    @property
    def shares(self) -> list[float]:
        """Of each rank of the world, 1 for one that takes as much as its group's mean."""
        return [share for group in self.groups for share in group.plan.shares]

    @property
    def relative_speeds(self) -> list[float]:
        """Of each rank of the world, over its group's mean; 1 where nothing is known."""
        speeds = []
        for group in self.groups:
            known = [s for s in group.speeds if s is not None]
            mean = sum(known) / len(known) if known else 1.0
            speeds += [1.0 if s is None else s / mean for s in group.speeds]
        return speeds

    def after(self, step: int, rows: Sequence[float], seconds: Sequence[float]) -> bool:
        """Take in what each rank's experts did in a committed step, in rank order.

        Args:
            step: the committed step.
            rows: routed tokens that each rank's experts computed.
            seconds: what each rank's experts took, waiting excluded.

        Returns:
            Whether plans change from here on.
        """
        before, n = self.plans, self.ranks_per_group
        self.groups = [
            group.after(
                rows[i * n : (i + 1) * n],
                seconds[i * n : (i + 1) * n],
                self.config,
            )
            for i, group in enumerate(self.groups)
        ]
        if self.recorded is not None:
            self._set_plans(self.recorded.get(step, before))
        return self.plans != before

    def _set_plans(self, plans: Plans) -> None:
        self.groups = [
            Balance(group.speeds, CapacityPlan(tuple(units)))
            for group, units in zip(self.groups, plans, strict=True)
        ]

    def apply(self, routers: Sequence[TopKRouter], rank: int) -> None:
        """Give this rank's routers the plan of its group."""
        plan = self.groups[rank // self.ranks_per_group].plan
        for router in routers:
            assert isinstance(router.capacity, StragglerAwareCapacity)
            router.capacity.plan = plan

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain JSON."""
        return {"speeds": [list(group.speeds) for group in self.groups], "plans": self.plans}

    def load(self, state: dict[str, Any]) -> None:
        """The inverse, of a checkpoint of the same topology."""
        self._set_plans(state["plans"])
        self.groups = [
            Balance(tuple(speeds), group.plan)
            for speeds, group in zip(state["speeds"], self.groups, strict=True)
        ]


def read_plans(path: Path, like: Plans) -> dict[int, Plans]:
    """The ``capacity_plan`` lines of a run's log, by the step after which they hold.

    Where a step was run more than once, as after a resume, the last time counts.

    Raises InputError where the file cannot be read, or its plans are of other ranks than ``like``.
    """
    plans: dict[int, Plans] = {}
    try:
        lines = path.read_text().splitlines(keepends=True)
        for line in lines:
            if line is lines[-1] and not line.endswith("\n"):
                break  # cut off by a kill in the middle of it
            event = json.loads(line)
            if event["event"] == "capacity_plan":
                plans[event["step"]] = event["plans"]
            elif event["event"] == "step":
                plans.pop(event["step"], None)
    except OSError as error:
        raise InputError(
            f"train.replay_capacity_plans ({path}) cannot be read: {error.strerror}"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise InputError(
            f"train.replay_capacity_plans ({path}) must be the log.jsonl of a run"
        ) from None
    for step, one in plans.items():
        if [len(units) for units in one] != [len(units) for units in like]:
            raise InputError(
                f"train.replay_capacity_plans ({path}) must be of {len(like)} expert groups of "
                f"{len(like[0])} ranks; after step {step} it has {[len(units) for units in one]}"
            )
        if any(min(units) < 1 or sum(units) != UNITS_PER_RANK * len(units) for units in one):
            raise InputError(
                f"train.replay_capacity_plans ({path}) must have positive units that sum to "
                f"{UNITS_PER_RANK} a rank; after step {step} it has {one}"
            )
    return plans
