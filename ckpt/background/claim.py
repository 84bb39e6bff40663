"""One writer process for a rank at a time: a lock file names its holder."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ckpt.store import lock_file

_COMMANDS = (b"ckpt.background.writer", b"ckpt.keeper")  # the second: of a release before


@contextlib.contextmanager
def claim(lock: Path, timeout_seconds: float) -> Iterator[None]:
    """Be the only keeper of this rank on this machine: an earlier one is asked to end, and killed
    where it does not in time."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_seconds
    asked = signal.SIGTERM
    while True:
        with contextlib.suppress(BlockingIOError):
            handle = lock_file(lock, 0o600)
            if _is_at(handle, lock):
                break
            # The holder before has removed the file: nobody else will look at this lock.
            os.close(handle)
            continue
        if time.monotonic() > deadline:
            asked = signal.SIGKILL
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            holder = lock.read_text()
            if _is_keeper(holder):
                os.kill(int(holder), asked)
        time.sleep(0.02)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _is_keeper(pid: str) -> bool:
    # What a lock says may be of another machine or container: nobody else's process is signalled.
    try:
        command = Path("/proc", pid, "cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    return any(name in command for name in _COMMANDS)
