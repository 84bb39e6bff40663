"""The operations on files that a save is made of, each one call.

Everything of a checkpoint that reaches a file system goes through :class:`Files`, so that what a
crash, a full disk or a kill can do to a save is known at each of them.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import numpy as np

PAGE = 4096
"""What addresses, offsets and lengths of direct writes must be multiples of."""

_DIRECT = getattr(os, "O_DIRECT", 0)


class Files:
    """The real ones. Every method raises OSError where the system refuses."""

    def make_folder(self, path: Path) -> None:
        """Make one folder, unless it is there."""
        path.mkdir(exist_ok=True)

    def create(self, path: Path) -> int:
        """A handle to a new file. Raises FileExistsError where there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def append(self, handle: int, data: memoryview) -> None:
        """Write at the end. Aligned data goes past the page cache where the file system can: that
        spares a copy of it, and spares the pages that other processes live from."""
        while data:
            data = data[_write(handle, data) :]

    def sync(self, handle: int) -> None:
        """Make a file's contents durable."""
        os.fsync(handle)

    def close(self, handle: int) -> None:
        """Let go of a handle."""
        os.close(handle)

    def sync_folder(self, path: Path) -> None:
        """Make the entries of a folder durable."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def link(self, old: Path, new: Path) -> None:
        """A second name of a file. Raises FileExistsError where the name is taken."""
        os.link(old, new)

    def remove(self, path: Path) -> None:
        """Remove one name of a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()


def _write(handle: int, data: memoryview) -> int:
    whole = len(data) // PAGE * PAGE
    aligned = not os.lseek(handle, 0, os.SEEK_CUR) % PAGE and not address(data) % PAGE
    if whole and aligned and _set_direct(handle, True):
        try:
            return os.write(handle, data[:whole])
        except OSError as error:
            if error.errno != errno.EINVAL:  # this one wants other alignments: without, then
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
    """Where ``data`` is in memory."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])
