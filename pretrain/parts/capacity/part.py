"""Straggler-aware capacity as a part of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pretrain.errors import InputError
from pretrain.observe import CapacityPlanned, StepCommitted, read_log
from pretrain.parts.capacity.rule import CapacityBalance
from pretrain.parts.step import Part, PartContext, Plans, StepFacts, Wish
from pretrain.spec import JobSpec
from router import StragglerAwareConfig


class CapacityPart(Part):
    """Plans the capacity of experts from the speeds that ranks bring to the barrier.

    Args:
        balance: speeds and plans.
        context: of the run.
    """

    name = "capacity"
    of_machines = True

    def __init__(self, balance: CapacityBalance, context: PartContext) -> None:
        self.balance, self.context = balance, context

    @classmethod
    def of_spec(cls, spec: JobSpec, context: PartContext) -> CapacityPart | None:
        """The part of a run; None but under straggler-aware capacity.

        Raises InputError where plans of another run are to be replayed and do not fit.
        """
        if spec.moe is None or not isinstance(spec.moe.capacity, StragglerAwareConfig):
            return None
        config = spec.moe.capacity
        balance, path = CapacityBalance(config, context.topology), config.replay_log
        if path:
            balance.replay(recorded_plans(Path(path)), Path(path))
        return cls(balance, context)

    def after(self, facts: StepFacts) -> Wish | None:
        """Wish for new plans where a rank's experts have changed their speed."""
        column = facts.reports.column
        rows, seconds = (
            torch.from_numpy(column(name)) for name in ("expert_rows", "expert_seconds")
        )
        if not self.balance.after(facts.step, rows, seconds):
            return None
        self.context.publish(
            CapacityPlanned(
                step=facts.step,
                plans=self.balance.plans,
                relative_speeds=self.balance.relative_speeds,
            )
        )
        return Wish(plans=self.balance.plans)

    def state(self) -> dict[str, Any]:
        """Measured speeds and plans."""
        return self.balance.state()

    def load(self, state: dict[str, Any]) -> Wish:
        """Wish for the plans of the checkpoint."""
        self.balance.load(state)
        return Wish(plans=self.balance.plans)


def recorded_plans(path: Path) -> dict[int, Plans]:
    """The capacity plans of a run's log, by the step after which they hold. Of a step that was
    taken more than once, as after a resume, the last time counts.

    Raises InputError where the file is not the log of a run.
    """
    try:
        log = read_log(path)
    except OSError as error:
        raise InputError(
            f"moe.capacity.replay_log ({path}) cannot be read: {error.strerror}"
        ) from None
    if log.problems:
        raise InputError(
            f"moe.capacity.replay_log ({path}) must be the log.jsonl of a run: {log.problems[0]}"
        )
    plans: dict[int, Plans] = {}
    for event in log.events:
        if isinstance(event, CapacityPlanned):
            plans[event.step] = event.plans
        elif isinstance(event, StepCommitted):
            plans.pop(event.step, None)
    return plans
