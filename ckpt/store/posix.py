"""The file operations of a save, each one method.

Every write to a file system goes through :class:`Files`: tests inject a crash, a full disk or a
kill at each of the operations.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import numpy as np

PAGE = 4096
"""Addresses, offsets and lengths of direct writes (O_DIRECT) must be multiples of this."""

_DIRECT = getattr(os, "O_DIRECT", 0)


class Files:
    """Operations on the real file system. Every method raises OSError where the system fails."""

    def make_folder(self, path: Path) -> None:
        """Make one folder; no error where the folder exists."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """Create a file and open it to write. Raises FileExistsError where the file exists."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, handle: int, data: memoryview) -> None:
        """Write at the end of the file.

        Aligned data bypasses the page cache where the file system can: this spares a copy, and
        leaves other processes' pages in the cache.
        """
        while data:
            data = data[_write(handle, data) :]

    def sync(self, handle: int) -> None:
        """Make a file's contents durable."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Close a file."""
        os.close(handle)

    def sync_folder(self, path: Path) -> None:
        """Make the entries of a folder durable."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def link(self, old: Path, new: Path) -> None:
        """Make a hard link. Raises FileExistsError where ``new`` exists."""
        os.link(old, new)

    def remove(self, path: Path) -> None:
        """Remove one name of a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


def sync_parents(files: Files, folder: Path) -> None:
    """Make the name of a folder durable, and those of the folders above, which may be new too.

    Skipped are folders of another user, and those of a file system that syncs no folders.
    """
    for parent in folder.resolve().parents:
        with contextlib.suppress(OSError):
            files.sync_folder(parent)


def _write(handle: int, data: memoryview) -> int:
    whole = len(data) // PAGE * PAGE
    aligned = not os.lseek(handle, 0, os.SEEK_CUR) % PAGE and not address(data) % PAGE
    if whole and aligned and _set_direct(handle, True):
        try:
            return os.write(handle, data[:whole])
        except OSError as error:
            if (
                error.errno != errno.EINVAL
            ):  # the file system has other alignments: write through the cache
                raise
    _set_direct(handle, False)
    return os.write(handle, data)


def _set_direct(handle: int, direct: bool) -> bool:
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    wanted = flags | _DIRECT if direct else flags & ~_DIRECT
    if wanted != flags:
        try:
            fcntl.fcntl(handle, fcntl.F_SETFL, wanted)
        except OSError:
            return False
    return direct and bool(_DIRECT)


def address(data: memoryview) -> int:
    """The address of ``data`` in memory."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
