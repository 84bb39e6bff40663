"""One writer process for a rank at a time: a lock file names its holder."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ckpt.store import lock_file

_COMMANDS = (b"ckpt.background.writer", b"ckpt.keeper")  # the second is the module's former name


@contextlib.contextmanager
def claim(lock: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold the lock of this rank's writer process on this machine.

    An earlier writer process that holds the lock is sent SIGTERM, and SIGKILL after
    ``timeout_seconds``.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout_seconds
    asked = signal.SIGTERM
    while True:
        with contextlib.suppress(BlockingIOError):
            handle = lock_file(lock, 0o600)
            if _is_at(handle, lock):
                break
            # The former holder removed the file: no other process will look at this lock.
            os.close(handle)
            continue
        if time.monotonic() > deadline:
            asked = signal.SIGKILL
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            holder = lock.read_text()
            if _is_writer_process(holder):
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


def _is_writer_process(pid: str) -> bool:
    # The lock may name a process of another machine or container: that number may belong to an
    # unrelated process here, which must not be signalled.
    try:
        command = Path("/proc", pid, "cmdline").read_bytes()
    except (OSError, ValueError):
        return False
    return any(name in command for name in _COMMANDS)
