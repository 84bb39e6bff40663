"""Steps of the tiny job's trainer in one process of its own, with what they publish."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from parallel import local_shard
from pretrain.checkpoint.resume import restore
from pretrain.job import Job, build_job
from pretrain.observe import Events, StepCommitted
from pretrain.optim import moments
from pretrain.parts.step import Action
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.train.evaluate import evaluate
from pretrain.train.trainer import Trainer
from tests.support.layouts import NoCheckpoints
from tests.support.ranks import run_ranks

MOST_ATTEMPTS = 60


@dataclass(frozen=True)
class Run:
    """What some steps of one process were."""

    committed: list[StepCommitted]
    overflows: int
    """Steps that were skipped before the first one that was committed."""
    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    """By name of a moment and of a parameter."""
    evaluated: float
    """The loss of held-out sequences afterwards, where asked for."""


def run(spec: JobSpec, steps: int, loss_scale: float | None = None, evaluates: bool = False) -> Run:
    """So many committed steps, from the initial weights; with ``loss_scale`` the loss is scaled,
    whatever the precision."""
    on_rank = partial(_on_rank, spec, steps, loss_scale, evaluates)
    result: Run = run_ranks(on_rank, 1, group=False)[0]
    return result


def _on_rank(
    spec: JobSpec, steps: int, loss_scale: float | None, evaluates: bool, rank: int
) -> Run:
    runtime = start(spec.train.timeout_seconds)
    published: list[Any] = []
    job = build_job(spec, runtime, Events(published.append))
    progress = restore(job)
    if loss_scale is not None:
        progress = replace(progress, loss_scale=loss_scale)
    trainer = Trainer(job, progress, NoCheckpoints())  # type: ignore[arg-type]
    actions = []
    while actions.count(Action.COMMIT) < steps:
        actions.append(trainer.step(False).action)
        assert len(actions) < MOST_ATTEMPTS, "steps are skipped again and again"
    result = Run(
        [event for event in published if isinstance(event, StepCommitted)],
        actions.index(Action.COMMIT) if steps else 0,
        {name: local_shard(p.detach()).clone() for name, p in job.model.named_parameters()},
        _moments(job),
        evaluate(job).loss if evaluates else 0.0,
    )
    runtime.close()
    return result


def _moments(job: Job) -> dict[str, dict[str, Tensor]]:
    return {
        moment: {name: local_shard(value).clone() for name, value in by_name.items()}
        for moment, by_name in moments(job.optimizer, job.model).items()
    }
