"""What every part of a step promises, as tests.

A test class of a part inherits :class:`PartContract` and says how the part is made::

    class TestMine(PartContract):
        def make(self, context):
            return Mine(context)
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import torch

from parallel import Topology
from pretrain.observe import Event
from pretrain.parts.step import (
    Action,
    Decision,
    Part,
    PartContext,
    Report,
    Reports,
    StepFacts,
    Wish,
)

WORLD = 4


class PartContract:
    """Tests of a part; pytest runs them in subclasses."""

    def make(self, context: PartContext) -> Part:
        """A part as a run makes one."""
        raise NotImplementedError

    def steps(self) -> Sequence[list[Report]]:
        """Reports of some steps; a subclass may have steps about which the part does something."""
        return [[_report(loss=2.0 - 0.01 * step) for _ in range(WORLD)] for step in range(40)]

    def test_the_part_has_a_name(self) -> None:
        """The name is the key of the part's state and the first word of its columns."""
        part, _ = self._made(0)
        assert part.name.isidentifier()

    def test_the_columns_have_equal_names_in_every_step(self) -> None:
        """The barrier's vector has a fixed size."""
        part, _ = self._made(0)
        names = [list(part.report(reports[0])) for reports in self.steps()]
        assert all(each == names[0] for each in names)
        values = [v for reports in self.steps() for v in part.report(reports[0]).values()]
        assert all(isinstance(value, int | float) for value in values)

    def test_all_ranks_wish_equally(self) -> None:
        """Where ranks wished differently, some would wait for others for ever."""
        wishes = [self._run(self._made(rank)[0]) for rank in range(WORLD)]
        assert all(each == wishes[0] for each in wishes[1:])

    def test_a_state_is_plain_json_and_goes_on_as_if_nothing_had_happened(self) -> None:
        """A resumed run decides as an undisturbed run."""
        steps = self.steps()
        whole, _ = self._made(0)
        half = len(steps) // 2
        self._run(whole, steps[:half])
        state = whole.state()
        if state is None:
            return
        restored, _ = self._made(0)
        restored.load(json.loads(json.dumps(state)))
        assert restored.state() == json.loads(json.dumps(state))
        left = steps[half:]
        assert self._run(restored, left, half) == self._run(whole, left, half)

    def test_events_are_of_the_step(self) -> None:
        """An event has the number of committed steps."""
        part, published = self._made(0)
        self._run(part)
        assert all(0 <= event.step <= len(self.steps()) for event in published)

    def _made(self, rank: int) -> tuple[Part, list[Event]]:
        published: list[Event] = []
        return self.make(context_of(rank, published)), published

    def _run(
        self, part: Part, steps: Sequence[list[Report]] | None = None, before: int = 0
    ) -> list[Wish]:
        wishes = []
        for step, reports in enumerate(self.steps() if steps is None else steps, before + 1):
            columns = _columns(part, reports)
            facts = StepFacts(
                step, Reports.of(reports), _decision(reports), columns, next_micro_batches=8
            )
            wishes += [part.judge(facts) or Wish(), part.after(facts) or Wish()]
        return wishes


def context_of(rank: int, published: list[Event]) -> PartContext:
    """A context of four ranks on four machines; events go to ``published``."""
    return PartContext(
        rank=rank,
        topology=Topology(dp_replicate=WORLD),
        device=torch.device("cpu"),
        publish=published.append,
        machines=[f"machine-{i}" for i in range(WORLD)],
        exclude=lambda machine, why: True,
        goes_on_without=lambda left: True,
    )


def _columns(part: Part, reports: Sequence[Report]) -> dict[str, np.ndarray]:
    rows = [part.report(report) for report in reports]
    return {f"{part.name}.{k}": np.array([float(row[k]) for row in rows]) for k in rows[0]}


def _report(*, loss: float) -> Report:
    return Report(
        loss_sum=64 * loss,
        target_tokens=64.0,
        grad_square_sum=1.0,
        stop_requested=0.0,
        save_requested=0.0,
        step_seconds=1.0,
        data_wait_seconds=0.0,
        exposed_seconds=0.0,
        expert_rows=128.0,
        expert_seconds=0.5,
        bad_layer=-1.0,
    )


def _decision(reports: Sequence[Report]) -> Decision:
    tokens = sum(report.target_tokens for report in reports)
    return Decision(
        action=Action.COMMIT,
        loss=sum(report.loss_sum for report in reports) / tokens,
        grad_norm=math.sqrt(sum(report.grad_square_sum for report in reports)),
        target_tokens=int(tokens),
        stop=False,
        stop_cause=0,
        save=False,
        step_seconds=max(report.step_seconds for report in reports),
        data_wait_seconds=0.0,
        bad_router=None,
    )
