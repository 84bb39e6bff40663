"""When this process was started, and what its start was spent on."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_IMPORTED = time.monotonic()
_START_TIME = 22 - 3
"""The place of ``starttime`` in /proc/PID/stat after the command's name: proc(5) counts from 1, and
the name is the second field."""


def process_age() -> float:
    """Seconds since the kernel started this process, to about 0.01 s, by clocks that nobody sets.

    Where the system does not tell, since this module was imported.
    """
    imported = time.monotonic() - _IMPORTED
    if sys.platform != "linux":
        return imported
    try:
        values = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(values[_START_TIME])
    except (OSError, ValueError, IndexError):
        return imported
    if ticks <= 0:
        return imported  # a sandbox without the process's own time
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def process_start() -> float:
    """The Unix time at which this process was started, by the wall clock as it is set now."""
    return time.time() - process_age()


class StartParts:
    """Seconds of the parts of this process's start; the parts follow each other without gaps.

    Example:
        parts = StartParts()    # the process has imported what it needs
        parts.mark("imports")   # from the start of the process
        join()
        parts.mark("rendezvous")
    """

    def __init__(self) -> None:
        self.began = process_start()
        """Unix time at which the process started."""
        self._last = time.monotonic() - process_age()
        self._seconds: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """Give the time since the last mark to ``part``."""
        now = time.monotonic()
        self._seconds[part] = self._seconds.get(part, 0.0) + max(0.0, now - self._last)
        self._last = now

    @property
    def age(self) -> float:
        """Seconds since the process started, by a clock that nobody sets."""
        return process_age()

    @property
    def seconds(self) -> dict[str, float]:
        """The parts so far, in the order of their first marks."""
        return {part: round(each, 3) for part, each in self._seconds.items()}
