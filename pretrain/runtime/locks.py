"""Locks that keep a second run out of a run's folders."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ckpt.store import lock_file
from pretrain.errors import InputError
from pretrain.spec import JobSpec

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


@contextmanager
def lock_folder(folder: Path, field: str) -> Iterator[None]:
    """Make ``folder`` and hold its lock; the kernel releases the lock even after SIGKILL.

    Raises InputError, naming the spec's ``field``, where another run holds the lock or the folder
    cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = [lock_file(folder / ".lock")]
    except BlockingIOError:
        raise InputError(f"{field} ({folder}) is in use by another run") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise InputError(f"{field} ({folder}) cannot be written: {error.strerror}") from None
        held = []  # a file system without locks: a second run is not noticed
    try:
        yield
    finally:
        for handle in held:
            os.close(handle)


@contextmanager
def lock_run(spec: JobSpec) -> Iterator[None]:
    """Hold the locks of the run's folder and of its checkpoint folder.

    An object store has no locks; there a conditional write lets one run commit a step.
    """
    folders = {spec.run_path.resolve(): "run_dir"}
    if isinstance(spec.checkpoint_path, Path):
        folders.setdefault(spec.checkpoint_path.resolve(), "checkpoint.path")
    with ExitStack() as held:
        for folder, field in folders.items():
            held.enter_context(lock_folder(folder, field))
        yield
