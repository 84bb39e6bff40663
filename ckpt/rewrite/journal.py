"""The journal of an unfinished rewrite, and the lock of its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from crc32c import crc32c

from ckpt.errors import CheckpointError
from ckpt.rewrite.target import Receipt, UnfinishedError
from ckpt.store import Files, lock_file

FILES = Files()


class Locked:
    """A target with the lock of its folder, which the first process holds; pickled without it."""

    _lock: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_lock": None}

    def lock(self, path: Path, what: Path) -> None:
        """Take the lock of ``what``, which is at ``path``. Raises CheckpointError where another
        process holds the lock."""
        try:
            self._lock = lock_file(path)
        except BlockingIOError:
            raise CheckpointError(f"{what} is being written by another process") from None

    def end(self) -> None:
        """See :class:`ckpt.rewrite.Target`."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None


def unwritable(where: object, error: OSError) -> UnfinishedError:
    """The error for a target that cannot be written."""
    return UnfinishedError(
        f"{where} cannot be written: {error.strerror}: {error.filename or where}"
    )


def read_journal(path: Path) -> dict[str, Receipt]:
    """Every receipt of a journal. A line that a kill cut short is left out: that part is written
    again."""
    receipts: dict[str, Receipt] = {}
    if not path.exists():
        return receipts
    for line in path.read_bytes().split(b"\n"):
        check, _, body = line.partition(b" ")
        if check == b"%08x" % crc32c(body):
            key, receipt = json.loads(body)
            receipts[key] = receipt
    return receipts


def append_journal(path: Path, receipts: dict[str, Receipt]) -> None:
    """Add receipts, one a line with its CRC32C, durably."""
    lines = []
    for pair in receipts.items():
        body = json.dumps(pair).encode()
        lines.append(b"%08x %s\n" % (crc32c(body), body))
    new = not path.exists()
    with path.open("ab") as file:
        file.write(b"\n" + b"".join(lines))  # after what a kill may have cut short
        file.flush()
        os.fsync(file.fileno())
    if new:
        FILES.sync_folder(path.parent)
