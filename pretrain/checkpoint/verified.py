"""Going back to a checkpoint from before the last clean check, for the next start of a run."""

from __future__ import annotations

import ckpt
from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.checkpoint.rolling_back import roll_back
from pretrain.checkpoint.run_id import BEGINNING
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.observe import Notice


def leave_verified(job: Job, checkpointer: Checkpointer, verified_step: int | None) -> int | None:
    """Leave only checkpoints of ``verified_step`` and before; every rank must call.

    Saves that were begun are waited for. Newer checkpoints are moved to ``away/``, and those in
    nodes' memory and on their disks are not taken, as after ``convoy prepare --load-step``. This
    run cannot go on afterwards.

    Args:
        job: the run.
        checkpointer: what saves the run.
        verified_step: None where every checkpoint is verified; nothing is moved then.

    Returns:
        The step after which the next start begins, 0 for the beginning; None where the folder has
        checkpoints, and none of them is of ``verified_step`` or before: nothing is moved then.

    Raises InputError where the folder cannot be changed.
    """
    runtime, root = job.runtime, job.spec.checkpoint_path
    checkpointer.wait()
    runtime.agree(True)  # from here on no writer process has anything to write

    def leave() -> int:
        steps = ckpt.committed_steps(root)
        if verified_step is None:
            return max(steps, default=0)
        step = max((s for s in steps if s <= verified_step), default=BEGINNING)
        if step == BEGINNING and verified_step > 0:
            return BEGINNING
        try:
            roll_back(root, step, lambda text: job.events.publish(Notice(step=step, text=text)))
        except OSError as error:
            raise InputError(
                f"checkpoint.path ({root}) cannot be changed: {error.strerror}"
            ) from None
        return max(step, 0)

    step = runtime.from_first(leave)
    return None if step == BEGINNING else step
