"""What lets a run stop by itself: the preemption notice file, and the time limit."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from pretrain.observe import (
    CheckpointCommitted,
    Event,
    Events,
    LoggedEvent,
    SaveBegun,
)
from pretrain.runtime import (
    NoticeFile,
    Runtime,
    StopCause,
    StopRequest,
    TimeLimit,
    slurm_end,
)


def watch_notices(
    runtime: Runtime,
    events: Events,
    stop: StopRequest,
    *,
    limit_seconds: float | None,
    former: Sequence[LoggedEvent],
    until: ExitStack,
) -> None:
    """Let ``stop`` watch for the notice file and the time limit of a run.

    Any rank's request becomes the decision of all ranks at the step barrier. The first rank of each
    machine looks for the notice file, which may be on the machine's own disk. Rank 0 keeps the
    time: its events tell what saves take.

    Args:
        runtime: this rank.
        events: where a notice is published, and where saves tell what they take.
        stop: the requests of this rank.
        limit_seconds: ``train.time_limit_seconds``.
        former: the log of former starts, whose saves are a measure for the first save of this one.
        until: closed when the run ends.
    """
    path = os.environ.get("CONVOY_NOTICE_FILE")
    began = runtime.start_parts.began
    if path and runtime.rank % runtime.ranks_per_node == 0:
        _watch_file(NoticeFile(Path(path), since=began), path, events, stop, until)
    if runtime.is_first:
        age = runtime.start_parts.age
        left = _seconds_left(limit_seconds, age, events)
        if left is not None:
            # Counted by a clock that nobody sets. That of Slurm's end is asked here alone.
            limit = TimeLimit(time.monotonic() + left, seconds=left + age)
            _watch_time(limit, events, stop, former)


def _watch_file(
    file: NoticeFile, path: str, events: Events, stop: StopRequest, until: ExitStack
) -> None:
    until.callback(file.close)
    if file.is_old:
        events.note(
            f"CONVOY_NOTICE_FILE ({path}) is older than this start, and is no notice to it; remove "
            f"the file, or touch it to announce a preemption",
        )
    stop.watch(lambda: StopCause.NOTICE_FILE if file.seen else StopCause.NONE, urgent=True)


def _seconds_left(seconds: float | None, age: float, events: Events) -> float | None:
    """Seconds to the earlier of the spec's limit and the end of the Slurm job; None without any."""
    ends = [] if seconds is None else [seconds - age]
    slurm, now = slurm_end(os.environ), time.time()
    if slurm is not None and slurm <= now:
        events.note(f"SLURM_JOB_END_TIME ({slurm:.0f}) has passed: the run takes it for no limit")
    elif slurm is not None:
        ends.append(slurm - now)
    return min(ends, default=None)


def _watch_time(
    limit: TimeLimit,
    events: Events,
    stop: StopRequest,
    former: Sequence[LoggedEvent],
) -> None:
    for line in former:
        note_save(limit, line.event)
    events.subscribe(lambda event: note_save(limit, event))
    first = [True]

    def cause() -> StopCause:
        due = limit.begin_step()
        if due and first[0]:
            left = limit.left_seconds
            events.note(
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
