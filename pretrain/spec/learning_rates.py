"""The learning rate of a step of a run, and whether it jumps."""

from __future__ import annotations

from pretrain.spec.job import JobSpec


def learning_rate(spec: JobSpec, step: int, total_steps: int | None = None) -> float:
    """The learning rate of the update that makes step ``step + 1``.

    Args:
        spec: the run.
        step: the steps that are committed.
        total_steps: the length of the run; None for ``train.steps``.
    """
    total = spec.train.steps if total_steps is None else total_steps
    return spec.optimizer.lr * spec.schedule.ratio(step, total)


def is_learning_rate_jump(before: float, now: float) -> bool:
    """Whether a learning rate changes by more than a fifth."""
    return abs(now - before) > 0.2 * before
