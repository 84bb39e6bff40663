"""Notices that a machine will be taken away: a file that appears, and the end of a time limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

_POLL_SECONDS = 1.0
"""Clouds give at least 30 s between a notice and the end of a machine."""
_END_SECONDS = 5.0
"""For the end of the processes, after the checkpoint is committed."""
_CAUTION = 1.25
"""The next step and the next save may take so many times what the slowest so far took."""
_SAVES = 16
"""Saves that the time of the next one is estimated from."""
_FIRST_SAVE_SECONDS, _FIRST_SAVE_SHARE = 60.0, 0.1
"""The estimate before any save: so many seconds, and at most this share of the time limit."""


class NoticeFile:
    """Watches for a file whose appearance announces that this machine will be taken away.

    A thread looks for the file, so that a file system that hangs does not stop a step. A file that
    was there before ``since`` belongs to an earlier start and is no notice, until the file is
    written or touched again.

    Args:
        path: the file.
        since: Unix time from which on a file is a notice.
        poll_seconds: seconds between two looks.
    """

    def __init__(self, path: Path, *, since: float, poll_seconds: float = _POLL_SECONDS) -> None:
        self.path = path
        self.seen = False
        """Whether the file has appeared."""
        found = _version(path)
        self.is_old = found is not None and found[0] < since
        """Whether the file was there before ``since``."""
        self._old = found if self.is_old else None
        self._poll_seconds = poll_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="notice-file", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self.seen:
            found = _version(self.path)
            self.seen = found is not None and found != self._old
            if self._closed.wait(0.0 if self.seen else self._poll_seconds):
                return

    def close(self) -> None:
        """Look no more. Does not wait for a look that hangs."""
        self._closed.set()
        self._thread.join(timeout=1.0)


def _version(path: Path) -> tuple[float, int] | None:
    """The time of the last change and the inode of a file; None where the file is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime, found.st_ino


def must_stop(now: float, deadline: float, *, step_seconds: float, save_seconds: float) -> bool:
    """Whether the step that begins now must be the last one before ``deadline``.

    The step after it would end at ``now + 2 * step_seconds``, and a save would follow.

    Args:
        now: the time by some clock.
        deadline: the time by this clock at which the process must have ended.
        step_seconds: from the begin of a step to the begin of the next one.
        save_seconds: from the end of a step until its checkpoint is committed.
    """
    needed = _CAUTION * (2 * step_seconds + save_seconds) + _END_SECONDS
    return now + needed > deadline


class TimeLimit:
    """Says when a run must stop so that its last checkpoint is committed before a deadline.

    Steps and saves are measured. The first step of a process is longer than others, and counts only
    until a second step was measured.

    Args:
        deadline: the time by the clock ``now`` at which the process must have ended.
        seconds: the whole limit, from the start of the process to the deadline.
        now: a clock that nobody sets. The wall clock may jump by hours: a step would seem to last
            as long, and the run would stop long before its limit, or go on after it.
    """

    def __init__(
        self, deadline: float, *, seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.deadline, self._now = deadline, now
        self.first_save_seconds = min(_FIRST_SAVE_SECONDS, _FIRST_SAVE_SHARE * max(0.0, seconds))
        self._last_begin: float | None = None
        self._steps = 0
        self._step_seconds = 0.0
        self._stalls: deque[float] = deque(maxlen=_SAVES)
        self._commits: deque[float] = deque(maxlen=_SAVES)

    @property
    def save_seconds(self) -> float:
        """The estimate of the last save: twice a save, because the last one may have to wait for
        one that has just begun."""
        if not self._commits:
            return self.first_save_seconds
        return 2 * (max(self._stalls, default=0.0) + max(self._commits))

    @property
    def left_seconds(self) -> float:
        """From now to the deadline."""
        return self.deadline - self._now()

    def note_stall(self, seconds: float) -> None:
        """Note what training waited for the copy of a save."""
        self._stalls.append(seconds)

    def note_commit(self, seconds: float) -> None:
        """Note the seconds from the copy of a save to its commit."""
        self._commits.append(seconds)

    def begin_step(self) -> bool:
        """Note that a step begins now; whether the run must stop after this step."""
        now = self._now()
        if self._last_begin is not None:
            seconds = now - self._last_begin
            self._step_seconds = seconds if self._steps == 2 else max(self._step_seconds, seconds)
        self._steps += 1
        self._last_begin = now
        return must_stop(
            now,
            self.deadline,
            step_seconds=self._step_seconds,
            save_seconds=self.save_seconds,
        )


def slurm_end(environment: Mapping[str, str]) -> float | None:
    """The Unix time at which Slurm ends this job, from ``SLURM_JOB_END_TIME``.

    Slurm sets the variable since some version after 22.05. None where the variable is missing, or
    is no number.
    """
    text = environment.get("SLURM_JOB_END_TIME", "")
    return float(text) if text.isascii() and text.isdigit() else None
