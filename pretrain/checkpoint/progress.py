"""Which checkpoints of a run there are, as far as this start knows."""

from __future__ import annotations

from dataclasses import dataclass

import ckpt
from ckpt import Location
from pretrain.runtime import Runtime


@dataclass
class CheckpointProgress:
    """The newest step that was restored, and begun."""

    restored: int
    """The step after which this start began; 0 for a new run."""
    begun: int
    """The newest step of which a save was begun, or that was restored."""
    shared_begun: int
    """The newest step that the shared tier has, or was given."""

    @staticmethod
    def after(restored: int, shared_step: int) -> CheckpointProgress:
        """For a start that resumed after ``restored``; the shared tier has ``shared_step``."""
        return CheckpointProgress(restored, restored, shared_step)


def newest_shared_step(runtime: Runtime, root: Location) -> int:
    """The newest committed step in the shared folder, or -1; every rank must call."""
    return runtime.from_first(lambda: max(ckpt.committed_steps(root), default=-1))


def way_back(runtime: Runtime, root: Location) -> str:
    """What to do after a run that cannot go on, of committed checkpoints only; every rank must
    call."""
    newest = newest_shared_step(runtime, root)
    if newest < 0:
        return (
            f"no checkpoint is committed in {root}; lower optimizer.lr, and start over with "
            f"`convoy prepare SPEC --reset`"
        )
    return (
        f"the newest committed checkpoint is step {newest} in {root}; lower optimizer.lr and run "
        f"the same command, or go back first with `convoy prepare SPEC --load-step STEP`"
    )
