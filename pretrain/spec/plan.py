"""The ``[plan]`` section of the spec: a layout that the planner chooses."""

from __future__ import annotations

from pretrain.section import OnResume, Section


class PlanConfig(Section):
    """The ``[plan]`` section: the layout that ``convoy plan`` finds, in the place of one that a
    person chooses."""

    on_resume = OnResume.FREE

    cluster: str | None = None
    """A cluster file, or the name of a shipped one, as in ``convoy plan --cluster``: each start
    plans the layout for its ranks, prints it, and trains with it. The degrees of ``[parallel]``,
    pipeline schedule, ZeRO stage, recomputation and ``batch.micro_batch_size`` are then the
    planner's; checkpoints have the spec with the layout that was taken. None: the layout is that of
    ``[parallel]``."""
