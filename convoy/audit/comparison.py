"""Two recorded runs with ``train.exact``: the first step and the first tensor that differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import ckpt
from convoy.audit.faulty_run import arrays_that_differ
from convoy.audit.replayed import RecordedStep, checkpoints_of, recorded_steps
from pretrain.errors import InputError


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
        found = []
        if self.differing is None:
            found.append(f"steps {first} to {last}: equal, bit for bit")
        else:
            one, other = self.differing
            found.append(f"step {one.step} is the first that differs: {one.difference(other)}")
            for name, each in (("RUN_DIR", one), ("OTHER", other)):
                found.append(f"  {name}: loss {each.loss!r}, gradient norm {each.grad_norm!r}")
        if self.checkpoint is None:
            found.append("checkpoints: the runs have none of an equal step to compare")
        elif self.arrays:
            some = ", ".join(self.arrays[:3])
            rest = f" and {len(self.arrays) - 3} more" if len(self.arrays) > 3 else ""
            found.append(f"checkpoints of step {self.checkpoint}: {some}{rest} differ")
        else:
            found.append(f"checkpoints of step {self.checkpoint}: equal, bit for bit")
        return found


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
