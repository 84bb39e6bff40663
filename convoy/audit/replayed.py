"""Steps of a recorded run once more, compared with its log; and two recorded runs compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import ckpt
from convoy.audit.faulty_run import arrays_that_differ
from pretrain.checkpoint import Checkpointer, load_step, saved_spec
from pretrain.errors import InputError
from pretrain.job import build_job
from pretrain.observe import (
    Digested,
    Event,
    Events,
    RunStarted,
    StepCommitted,
    read_log,
    read_status,
)
from pretrain.parts.step import Action
from pretrain.runtime import start
from pretrain.spec import JobSpec, resolve_spec
from pretrain.train import Trainer

_FEW = 3
"""Names that fit into a line."""


@dataclass(frozen=True)
class RecordedStep:
    """What a log has of a committed step."""

    step: int
    loss: float
    grad_norm: float
    next_sample: int
    data_checksum: int | None = None
    """Of the samples; None in older logs."""
    digest: Digested | None = None
    """Of an exact run."""

    def difference(self, other: RecordedStep) -> str:
        """What differs first, for people; empty where all bits are equal."""
        sums = {self.data_checksum, other.data_checksum} - {None}
        if self.next_sample != other.next_sample or len(sums) > 1:
            return "the samples differ"
        layers, tensors = _differing(self.digest, other.digest, "gradient")
        if self.loss != other.loss:
            return "the loss differs: the forward has computed other numbers"
        if layers:
            # The backward goes from the last layer to the first one.
            return f"the gradient of {_names(layers[::-1], tensors)} differs"
        if self.grad_norm != other.grad_norm:
            return "the gradient norm differs"
        layers, tensors = _differing(self.digest, other.digest, "parameter")
        if layers:
            return f"the updated parameter {_names(layers, tensors)} differs"
        return ""


def _differing(a: Digested | None, b: Digested | None, what: str) -> tuple[list[str], list[str]]:
    """The layers, and the names within layers, in the order of the model."""
    if a is None or b is None:
        return [], []
    ours, theirs = asdict(a), asdict(b)
    fields = ours[f"{what}_layers"], ours[f"{what}_tensors"]
    others = theirs[f"{what}_layers"], theirs[f"{what}_tensors"]
    layers, tensors = (
        [name for name, value in values.items() if value != of.get(name)]
        for values, of in zip(fields, others, strict=True)
    )
    return layers, tensors


def _names(layers: list[str], tensors: list[str]) -> str:
    """The first of the layers with the tensors, and how many more layers there are."""
    first = layers[0]
    if first in tensors:
        named = first
    else:
        within = [name for name in tensors if name not in layers]
        rest = f" and {len(within) - _FEW} more" if len(within) > _FEW else ""
        named = f"layer {first} ({', '.join(within[:_FEW])}{rest})"
    more = len(layers) - 1
    return f"{named}, and of {more} other layers," if more else named


@dataclass(frozen=True)
class ReplayedStep:
    """One step, as it is now and as the log has it."""

    now: RecordedStep
    logged: RecordedStep

    @property
    def difference(self) -> str:
        """What differs first, for people; empty where all bits are equal."""
        return self.now.difference(self.logged)


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
    logged = recorded_steps(run_dir)
    if step not in logged:
        raise InputError(
            f"step ({step}) must be in {run_dir / 'log.jsonl'}, which has {_known(logged)}"
        )
    root = checkpoints_of(run_dir)
    before = [saved for saved in ckpt.committed_steps(root) if saved < step]
    if not before:
        raise InputError(f"{root} must have a checkpoint of before step {step} to begin from")
    manifest = ckpt.read_manifest(root, before[-1])
    spec = spec_on_ranks(saved_spec(manifest), "the spec of the run, for a replay", overrides)
    runtime = start(spec.train.timeout_seconds)
    try:
        events: list[Event] = []
        job = build_job(spec, runtime, Events(events.append))
        progress = load_step(job, root, manifest)
        trainer = Trainer(job, progress, cast(Checkpointer, _NoCheckpoints()))
        steps = []
        while trainer.progress.step < step:
            decision = trainer.step(0)
            if decision.action is not Action.COMMIT:
                number = trainer.progress.step + 1
                raise InputError(f"step {number} is not committed in the replay: {decision.why}")
            now = _recorded(events)[trainer.progress.step]
            events.clear()
            steps.append(ReplayedStep(now, logged[now.step]))
            seen(steps[-1])
        return steps
    finally:
        runtime.close()


def checkpoints_of(run_dir: Path) -> str:
    """Where the checkpoints of a run are. Raises InputError where none are known."""
    root = read_status(run_dir).checkpoint_path
    if root is None:
        raise InputError(f"RUN_DIR ({run_dir}) has no checkpoints to begin from")
    return root


def recorded_steps(run_dir: Path, *, exact: bool = False) -> dict[int, RecordedStep]:
    """Each step of a run's log as it was taken last.

    Raises InputError where there is no log, and with ``exact`` where the run is not exact.
    """
    path = run_dir / "log.jsonl"
    try:
        events = read_log(path).events
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    starts = [event for event in events if isinstance(event, RunStarted)]
    if exact and not (starts and all(e.spec.get("train", {}).get("exact") for e in starts)):
        raise InputError(
            f"train.exact (false) in {run_dir} must be true to compare runs: other runs have equal "
            f"bits on one layout alone"
        )
    return _recorded(events)


def _recorded(events: Sequence[Event]) -> dict[int, RecordedStep]:
    digests = {event.step: event for event in events if isinstance(event, Digested)}
    return {
        e.step: RecordedStep(
            e.step, e.loss, e.grad_norm, e.consumed_samples, e.data_checksum, digests.get(e.step)
        )
        for e in events
        if isinstance(e, StepCommitted)
    }


def _known(logged: dict[int, RecordedStep]) -> str:
    return f"steps {min(logged)} to {max(logged)}" if logged else "no steps"


def spec_on_ranks(saved: dict[str, Any], what: str, overrides: Sequence[str]) -> JobSpec:
    """A saved spec for other ranks than the run's: one replica that all ranks shard, unless
    ``overrides`` say otherwise, without injected faults and checks.

    Raises InputError, which calls the spec ``what``, where it does not fit.
    """
    degrees = {"pp": 1, "dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "ep": 1}
    saved["parallel"] |= degrees | {"pipeline": {}, "gradient_compression": "none"}
    saved["checkpoint"]["reshard_on_load"] = True
    saved["inject"] = []
    saved["verify"] = {}
    return resolve_spec(saved, what, overrides)


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common."""

    steps: tuple[int, int]
    """The first and the last step that both logs have."""
    differing: tuple[RecordedStep, RecordedStep] | None
    """The first step that differs, in the one run and in the other."""
    checkpoint: int | None
    """The newest step whose checkpoints are compared: of both runs, and before ``differing``."""
    arrays: list[str]
    """The arrays of these checkpoints that differ."""

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return self.differing is None and not self.arrays

    def lines(self) -> list[str]:
        """What was found, for people."""
        first, last = self.steps
        lines = []
        if self.differing is None:
            lines.append(f"steps {first} to {last}: equal, bit for bit")
        else:
            first_run, other = self.differing
            lines.append(
                f"step {first_run.step} is the first that differs: {first_run.difference(other)}"
            )
            for name, recorded in (("RUN_DIR", first_run), ("OTHER", other)):
                lines.append(
                    f"  {name}: loss {recorded.loss!r}, gradient norm {recorded.grad_norm!r}"
                )
        if self.checkpoint is None:
            lines.append("checkpoints: the runs have none of an equal step to compare")
        elif self.arrays:
            some = ", ".join(self.arrays[:3])
            rest = f" and {len(self.arrays) - 3} more" if len(self.arrays) > 3 else ""
            lines.append(f"checkpoints of step {self.checkpoint}: {some}{rest} differ")
        else:
            lines.append(f"checkpoints of step {self.checkpoint}: equal, bit for bit")
        return lines


def compare_runs(run_dir: Path, other_dir: Path) -> Comparison:
    """Compare the logs of two exact runs step by step, and their newest common checkpoints of
    before the first step that differs.

    Raises InputError where a run is not exact, or the runs have no step in common.
    """
    runs = [run_dir, other_dir]
    logs = [recorded_steps(run, exact=True) for run in runs]
    common = sorted(logs[0].keys() & logs[1].keys())
    if not common:
        raise InputError(f"{run_dir} and {other_dir} must have a step in common in their logs")
    pairs = ((logs[0][step], logs[1][step]) for step in common)
    differing = next((pair for pair in pairs if pair[0].difference(pair[1])), None)
    last = common[-1] if differing is None else differing[0].step - 1
    roots = [checkpoints_of(run) for run in runs]
    saved = [set(ckpt.committed_steps(root)) for root in roots]
    checkpoint = max((step for step in saved[0] & saved[1] if step <= last), default=None)
    arrays: list[str] = []
    if checkpoint is not None:
        arrays = arrays_that_differ(roots[0], roots[1], checkpoint)
    return Comparison((common[0], common[-1]), differing, checkpoint, arrays)
