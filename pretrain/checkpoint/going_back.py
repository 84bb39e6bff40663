"""Going back to a checkpoint in the middle of a run, without a new start."""

from __future__ import annotations

from collections.abc import Callable

import ckpt
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.progress import CheckpointProgress
from pretrain.checkpoint.resume import restore
from pretrain.job import Job
from pretrain.parts.playbook import HealthMemory
from pretrain.state import Progress, read_run_state


def go_back(
    job: Job, checkpointer: Checkpointer, count: int, remember: Callable[[Progress], HealthMemory]
) -> Progress | None:
    """Restore a committed checkpoint of the shared folder into a job that has trained beyond it;
    every rank must call.

    Saves that were begun are waited for. Newer checkpoints are moved to ``away/``, and removed from
    the node-local tiers, as after ``convoy prepare --load-step``. If the process dies meanwhile,
    the next start goes on from the same checkpoint with the same memory, or from before this call.

    Args:
        job: what is filled.
        checkpointer: what saves the run.
        count: 1 for the newest checkpoint, 2 for the one before, and so on; the oldest checkpoint
            where there are fewer.
        remember: what the playbook remembers from then on, given the counters of the checkpoint;
            equal on all ranks.

    Returns:
        The counters from which the run goes on; None where no checkpoint is committed.

    Raises InputError or CheckpointError where the folder cannot be changed, or the checkpoint
    cannot be read.
    """
    runtime, root = job.runtime, checkpointer.root
    checkpointer.settle()
    step = runtime.from_first(lambda: (ckpt.committed_steps(root)[-count:] or [-1])[0])
    if step < 0:
        return None
    manifest = runtime.together(lambda: ckpt.read_manifest(root, step))
    state = read_run_state(manifest)
    assert state is not None, "a run does not begin from weights in its own folder"
    memory = remember(state.progress)
    runtime.first(lambda: checkpointer.roll_back(step, memory))
    progress = restore(job, checkpointer.writer.tiers)
    checkpointer.progress = CheckpointProgress.after(progress.step, progress.step)
    return progress
