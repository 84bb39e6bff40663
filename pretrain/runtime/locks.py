"""Locks that keep two runs out of one folder."""

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
    """Make a folder and hold its lock; the kernel lets go of it even after SIGKILL.

    Raises InputError, naming ``field``, where another run holds it or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held = [lock_file(folder / ".lock")]
    except BlockingIOError:
        raise InputError(f"{field} ({folder}) is in use by another run") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise InputError(f"{field} ({folder}) cannot be written: {error.strerror}") from None
        held = []  # a file system without locks: the operator must see to it
    try:
        yield
    finally:
        for handle in held:
            os.close(handle)


@contextmanager
def lock_run(spec: JobSpec) -> Iterator[None]:
    """Hold the run's folder and, should it be elsewhere, its checkpoint folder. An object store has
    no locks: there a step is committed once, whoever tries."""
    folders = {spec.run_path.resolve(): "run_dir"}
    if isinstance(spec.checkpoint_path, Path):
        folders.setdefault(spec.checkpoint_path.resolve(), "checkpoint.path")
    with ExitStack() as held:
        for folder, field in folders.items():
            held.enter_context(lock_folder(folder, field))
        yield
