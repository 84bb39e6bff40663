"""What lets a run stop by itself: the preemption notice file, and the time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pretrain.job import Job
from pretrain.observe import (
    CheckpointCommitted,
    Event,
    LoggedEvent,
    Notice,
    SaveBegun,
)
from pretrain.runtime import (
    NoticeFile,
    StopCause,
    StopRequest,
    TimeLimit,
    slurm_end,
)


def watch_notices(
    job: Job, stop: StopRequest, *, former: Sequence[LoggedEvent], held: ExitStack
) -> None:
    """Let ``stop`` watch for the notice file and the time limit of a run.

    Any rank's request becomes the decision of all ranks at the step barrier. The first rank of each
    machine looks for the notice file, which may be on the machine's own disk. Rank 0 keeps the
    time: its events tell what saves take.

    Args:
        job: the run.
        stop: the requests of this rank.
        former: the log of former starts, whose saves are a measure for the first save of this one.
        held: closed when the run ends.
    """
    path = os.environ.get("CONVOY_NOTICE_FILE")
    if path and job.runtime.rank % job.runtime.ranks_per_node == 0:
        _watch_file(job, stop, Path(path), held)
    if job.runtime.is_first and (deadline := _deadline(job)) is not None:
        _watch_time(job, stop, deadline, former)


def _watch_file(job: Job, stop: StopRequest, path: Path, held: ExitStack) -> None:
    file = NoticeFile(path, since=job.runtime.start_parts.began)
    held.callback(file.close)
    if file.is_old:
        _tell(
            job,
            f"CONVOY_NOTICE_FILE ({path}) is older than this start, and is no notice to it; remove "
            f"the file, or touch it to announce a preemption",
        )
    stop.watch(lambda: StopCause.NOTICE_FILE if file.seen else StopCause.NONE, urgent=True)


def _deadline(job: Job) -> float | None:
    """The earlier of the spec's limit and the end of the Slurm job; None without any."""
    began, seconds = job.runtime.start_parts.began, job.spec.train.time_limit_seconds
    ends = [] if seconds is None else [began + seconds]
    slurm = slurm_end(os.environ)
    if slurm is not None and slurm <= time.time():
        _tell(job, f"SLURM_JOB_END_TIME ({slurm:.0f}) has passed: the run takes it for no limit")
    elif slurm is not None:
        ends.append(slurm)
    return min(ends, default=None)


def _watch_time(
    job: Job, stop: StopRequest, deadline: float, former: Sequence[LoggedEvent]
) -> None:
    limit = TimeLimit(deadline, began=job.runtime.start_parts.began)
    for line in former:
        note_save(limit, line.event)
    job.events.subscribe(lambda event: note_save(limit, event))
    first = [True]

    def cause() -> StopCause:
        due = limit.begin_step()
        if due and first[0]:
            left = deadline - time.time()
            _tell(
                job,
                f"the time limit is {left:.0f} s away at the first step of this start, which is "
                f"not enough for more steps and a checkpoint: one step is taken and saved; raise "
                f"train.time_limit_seconds, or the time limit of the job",
            )
        first[0] = False
        return StopCause.TIME_LIMIT if due else StopCause.NONE

    stop.watch(cause)


def note_save(limit: TimeLimit, event: Event) -> None:
    """Let a time limit know what saves to the shared tier take."""
    match event:
        case SaveBegun(stall_seconds=seconds, tiers=tiers) if "shared" in tiers:
            limit.note_stall(seconds)
        case CheckpointCommitted(tier="shared", seconds=seconds):
            limit.note_commit(seconds)


def _tell(job: Job, text: str) -> None:
    job.events.publish(Notice(step=0, text=text))
