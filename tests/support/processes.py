"""Processes of this machine, for tests and benches that watch or kill ranks; Linux only."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process runs: one that has ended may still wait to be read by its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """All processes below one, parents first."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def rank_process(torchrun: int, rank: int) -> int:
    """The process that trains as a rank: the last one on the way down that has the rank."""
    found = []
    for pid in descendants(torchrun):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if f"RANK={rank}".encode() in words and b"pretrain" in command:
                found.append(pid)
    return found[-1]


def kill_with_descendants(pid: int) -> None:
    """SIGKILL to a process and all below it."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
