"""Folders that are whole or not there, and files that one process holds."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.store.posix import Files, sync_parents

_FILES = Files()


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden sibling of ``target`` that takes the name ``target`` at the end of the block.

    Where the block raises, the hidden folder is removed.

    Raises FileExistsError where ``target`` is there already, and OSError where it cannot be
    written.
    """
    target = target.absolute()
    _refuse_existing(target)
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        hidden.mkdir(parents=True)
        yield hidden
        publish_folder(hidden, target)
    finally:
        shutil.rmtree(hidden, ignore_errors=True)


def publish_folder(hidden: Path, target: Path) -> None:
    """Make the files of a folder durable, and give the folder its name.

    Files in folders of ``hidden`` are taken to be durable already.

    Raises FileExistsError where ``target`` is there already.
    """
    for path in hidden.iterdir():
        _sync(path)
    _FILES.sync_folder(hidden)
    _refuse_existing(target)  # rename would replace an empty folder
    hidden.rename(target)
    _FILES.sync_folder(target.parent)
    sync_parents(_FILES, target.parent)


def _refuse_existing(target: Path) -> None:
    if target.exists():
        rule = "must not exist: choose another folder, or remove it"
        raise FileExistsError(errno.EEXIST, rule, str(target))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def lock_file(path: Path, mode: int = 0o644) -> int:
    """Open a file and hold its lock: the handle, to be closed when the lock may go.

    The kernel lets go of the lock when the process ends, even after SIGKILL.

    Raises BlockingIOError where another process holds the lock, and OSError where the file cannot
    be opened or its file system has no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle
