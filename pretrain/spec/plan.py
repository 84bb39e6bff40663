"""The ``[plan]`` section of the spec: a layout that the planner chooses."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from pretrain.section import OnResume, Section


class PlanConfig(Section):
    """The ``[plan]`` section: the layout that ``convoy plan`` finds, in the place of one that a
    person chooses."""

    on_resume = OnResume.FREE

    auto: bool = False
    """Each start plans the layout for its ranks, prints it, and trains with it. The degrees of
    ``[parallel]``, pipeline schedule, ZeRO stage, recomputation and ``batch.micro_batch_size`` are
    then the planner's; checkpoints have the spec with the layout that was taken."""
    cluster: str | None = None
    """A cluster file, or the name of a shipped one, as in ``convoy plan --cluster``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.auto and self.cluster is None:
            raise ValueError(
                "plan.auto (true) needs plan.cluster: a cluster file, or the name of a shipped one"
            )
        return self
