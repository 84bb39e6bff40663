"""Steps of a recorded run once more, on any ranks, compared with the run's log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ckpt
from pretrain.checkpoint import Checkpointer, load_step, saved_spec
from pretrain.errors import InputError
from pretrain.job import build_job
from pretrain.observe import StepCommitted, read_log, read_status
from pretrain.runtime import start
from pretrain.spec import JobSpec, resolve_spec
from pretrain.train.barrier import Action
from pretrain.train.trainer import Trainer


@dataclass(frozen=True)
class ReplayedStep:
    """One step, as it is now and as the log has it."""

    step: int
    loss: float
    grad_norm: float
    logged_loss: float
    logged_grad_norm: float

    @property
    def is_equal(self) -> bool:
        """Whether loss and gradient norm have the bits of the log."""
        return (self.loss, self.grad_norm) == (self.logged_loss, self.logged_grad_norm)


class _NoCheckpoints:
    """In the place of a checkpointer: a replay saves nothing."""

    requested = False


def replay(
    run_dir: Path,
    step: int,
    overrides: list[str],
    seen: Callable[[ReplayedStep], None],
) -> list[ReplayedStep]:
    """Take a run's steps again from its newest checkpoint before ``step``, up to ``step``.

    Nothing of the run is changed. The layout is one replica that all ranks shard, unless
    ``overrides`` say otherwise.

    Args:
        run_dir: the run's folder.
        step: the last step to take, from 1.
        overrides: ``section.field=value``, over the spec of the checkpoint.
        seen: called after each step, on every rank.

    Raises InputError where the run has no such step in its log, no checkpoint before the step, or
    was not the same on these ranks.
    """
    logged = _logged_steps(run_dir)
    if step not in logged:
        raise InputError(
            f"step ({step}) must be in {run_dir / 'log.jsonl'}, which has {_known(logged)}"
        )
    root = read_status(run_dir).checkpoint_path
    if root is None:
        raise InputError(f"RUN_DIR ({run_dir}) has no checkpoints to begin from")
    before = [each for each in ckpt.committed_steps(root) if each < step]
    if not before:
        raise InputError(f"{root} must have a checkpoint of before step {step} to begin from")
    manifest = ckpt.read_manifest(root, before[-1])
    spec = _spec_of(saved_spec(manifest), overrides)
    runtime = start(spec.train.timeout_seconds)
    try:
        job = build_job(spec, runtime)
        progress = load_step(job, root, manifest)
        trainer = Trainer(job, progress, cast(Checkpointer, _NoCheckpoints()))
        found = []
        while trainer.progress.step < step:
            decision = trainer.step(0)
            if decision.action is not Action.COMMIT:
                at = trainer.progress.step + 1
                raise InputError(f"step {at} is not committed in the replay: {decision.why}")
            record = logged[trainer.progress.step]
            found.append(
                ReplayedStep(
                    record.step, decision.loss, decision.grad_norm, record.loss, record.grad_norm
                )
            )
            seen(found[-1])
        return found
    finally:
        runtime.close()


def _logged_steps(run_dir: Path) -> dict[int, StepCommitted]:
    """Each step as it was taken last."""
    path = run_dir / "log.jsonl"
    try:
        events = read_log(path).events
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    return {event.step: event for event in events if isinstance(event, StepCommitted)}


def _known(logged: dict[int, StepCommitted]) -> str:
    return f"steps {min(logged)} to {max(logged)}" if logged else "no steps"


def _spec_of(saved: dict[str, Any], overrides: list[str]) -> JobSpec:
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "ep": 1}
    saved["parallel"] |= degrees | {"pipeline": {}, "gradient_compression": "none"}
    saved["checkpoint"]["reshard_on_load"] = True
    saved["inject"] = []
    saved["verify"] = {}
    return resolve_spec(saved, "the spec of the run, for a replay", overrides)
