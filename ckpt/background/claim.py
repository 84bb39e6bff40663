"""One trainer and one writer process for a rank at a time: lock files name their holders."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from ckpt.errors import CheckpointError
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


@contextlib.contextmanager
def owned(path: Path, what: str) -> Iterator[None]:
    """Hold a lock file for this process, which is the trainer's; ``what`` says what is locked.

    The lock goes with the process, and children that it forked do not hold it.

    Raises CheckpointError where this process or another one that is alive holds the lock.
    """
    if path in _OWNED:
        raise CheckpointError(f"this process already has {what}: close it first")
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(handle, 20, 0).decode() or "unknown"
            os.close(handle)
            raise CheckpointError(f"process {pid} has {what}: end it, or close it there") from None
        if _is_at(handle, path):
            break
        os.close(handle)  # the former holder removed the file
    _OWNED.add(path)
    try:
        os.ftruncate(handle, 0)
        os.pwrite(handle, str(os.getpid()).encode(), 0)
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(handle)
        _OWNED.discard(path)


_OWNED: set[Path] = set()
"""The locks of this process: the kernel gives a process a lock that it holds again."""


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
