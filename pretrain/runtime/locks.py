"""Locks that keep a second run out of a run's folders."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckpt.store import lock_file
from pretrain.errors import InputError
from pretrain.spec import JobSpec

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def lock_folder(folder: Path, field: str, wait_seconds: float = 0.0) -> Iterator[None]:
    """Make ``folder`` and hold its lock; the kernel releases the lock even after SIGKILL.

    ``wait_seconds`` is how long a lock that another process holds is waited for.

    Raises InputError, naming the spec's ``field``, where another run holds the lock or the folder
    cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = [_lock_within(folder / ".lock", wait_seconds)]
    except BlockingIOError:
        raise InputError(
            f"{field} ({folder}) is in use by another run: wait for the end of that run, whose "
            f"process `convoy status RUN_DIR` names, or choose another {field}"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise InputError(f"{field} ({folder}) cannot be written: {error.strerror}") from None
        held = []  # a file system without locks: a second run is not noticed
    try:
        yield
    finally:
        for handle in held:
            os.close(handle)


def _lock_within(path: Path, seconds: float) -> int:
    until = time.monotonic() + seconds
    while True:
        try:
            return lock_file(path)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise
        time.sleep(0.1)


@contextmanager
def lock_run(spec: JobSpec, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the locks of the run's folder and of its checkpoint folder.

    An object store has no locks; there a conditional write lets one run commit a step.
    ``wait_seconds`` is how long the locks of another process are waited for.
    """
    folders = {spec.run_path.resolve(): "run_dir"}
    if isinstance(spec.checkpoint_path, Path):
        folders.setdefault(spec.checkpoint_path.resolve(), "checkpoint.path")
    with ExitStack() as held:
        for folder, field in folders.items():
            held.enter_context(lock_folder(folder, field, wait_seconds))
        yield
