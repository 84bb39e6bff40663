"""Targets that are a folder of files: written in a hidden folder, which is renamed at the end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from crc32c import crc32c

from ckpt.errors import CheckpointError
from ckpt.rewrite.description import DESCRIPTION, Description
from ckpt.rewrite.journal import FILES, Locked, append_journal, read_journal, unwritable
from ckpt.rewrite.source import Source
from ckpt.rewrite.target import Part, Progress, Receipt
from ckpt.store import publish_folder
from parallel.layout import Topology

T = TypeVar("T")
_JOURNAL = "journal.jsonl"
_RECORD = ".rewrite.json"
"""In a finished folder: which rewrite made it, and the length and CRC32C of every file."""
_BLOCK = 4 << 20


class FolderTarget(Locked):
    """A :class:`ckpt.rewrite.Target` that is a folder of files; each format is a subclass.

    Args:
        source: what is written.
        folder: where; it must not exist.
        topology: the layout that the description names.
        options: whatever else changes the files; the hidden folder's name depends on it.
        beside: small files that the folder gets besides, by name; ``convoy.json``, the description
            of the arrays, where it is None.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        topology: Topology,
        options: str,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        self.source, self.folder = source, folder.absolute()
        if beside is None:
            beside = {DESCRIPTION: Description.of(source, topology).encode()}
        self.beside = dict(beside)
        text = f"{source.info.identity} {topology} {options} {sorted(self.beside.items())}"
        self.made = hashlib.sha256(text.encode()).hexdigest()
        self.work = self.folder.with_name(f".{self.folder.name}.{self.made[:12]}")

    def begin(self) -> dict[str, Receipt] | None:
        """See :class:`ckpt.rewrite.Target`; every file of an earlier call is read."""
        try:
            if self.folder.exists():
                self._check_committed()
                return None
            self.work.mkdir(parents=True, exist_ok=True)
            self.lock(self.work / ".lock", self.folder)
            return read_journal(self.work / _JOURNAL)
        except OSError as error:
            raise unwritable(self.folder, error) from None

    def _check_committed(self) -> None:
        """Raises CheckpointError where the folder is not this rewrite's, or not as written."""
        record: object = None
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):
            record = json.loads((self.folder / _RECORD).read_bytes())
        if not isinstance(record, dict) or record.get("rewrite") != self.made:
            raise CheckpointError(
                f"{self.folder} must not exist: choose another folder, or remove it"
            )
        for name, was in record["files"].items():
            if file_crc32c(self.folder / name) != tuple(was):
                raise CheckpointError(
                    f"{self.folder / name} is not as it was written: remove {self.folder}"
                )

    def parts(self) -> Sequence[Part]:
        """See :class:`ckpt.rewrite.Target`."""
        raise NotImplementedError

    def room(self) -> tuple[str, int | None]:
        """See :class:`ckpt.rewrite.Target`."""
        return str(self.folder), shutil.disk_usage(self.work).free

    def check(self, key: str, receipt: Receipt) -> bool:
        """See :class:`ckpt.rewrite.Target`."""
        return file_crc32c(self.work / key) == (receipt["bytes"], receipt["crc32c"])

    def write(self, key: str, slab_bytes: int, progress: Progress) -> Receipt:
        """See :class:`ckpt.rewrite.Target`."""
        path = self._path(key)
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            checked = Checked(file, progress)
            more = self.fill(checked, key, slab_bytes)
            file.flush()
            os.fsync(file.fileno())
        FILES.sync_folder(path.parent)
        return {"bytes": checked.nbytes, "crc32c": checked.value, **more}

    def fill(self, file: Checked, key: str, slab_bytes: int) -> dict[str, Any]:
        """Write one part's bytes; returns what else its receipt says."""
        raise NotImplementedError

    def journal(self, receipts: dict[str, Receipt]) -> None:
        """See :class:`ckpt.rewrite.Target`."""
        append_journal(self.work / _JOURNAL, receipts)

    def finish(self, receipts: dict[str, Receipt]) -> None:
        """Write the files that need all receipts, such as an index."""
        raise NotImplementedError

    def commit(self, receipts: dict[str, Receipt]) -> None:
        """See :class:`ckpt.rewrite.Target`."""
        try:
            for key, receipt in receipts.items():
                if not self.check(key, receipt):
                    raise CheckpointError(f"{self.work / key} is not as it was written")
            self.finish(receipts)
            for name, data in self.beside.items():
                self.put(name, data)
            # An earlier call may have been killed after it wrote the record.
            for name in (_JOURNAL, ".lock", _RECORD):
                (self.work / name).unlink(missing_ok=True)
            self.put(_RECORD, self._record(receipts))
            publish_folder(self.work, self.folder)
        except FileExistsError:
            raise CheckpointError(f"{self.folder} must not exist: somebody has made it") from None
        except OSError as error:
            raise unwritable(self.folder, error) from None

    def _record(self, receipts: dict[str, Receipt]) -> bytes:
        files: dict[str, object] = {key: [r["bytes"], r["crc32c"]] for key, r in receipts.items()}
        there = (path for path in self.work.rglob("*") if path.is_file())
        names = {path.relative_to(self.work).as_posix(): path for path in there}
        files |= {name: file_crc32c(path) for name, path in names.items() if name not in files}
        record = {"rewrite": self.made, "files": files}
        return (json.dumps(record, sort_keys=True) + "\n").encode()

    def discard(self) -> None:
        """See :class:`ckpt.rewrite.Target`."""
        shutil.rmtree(self.work, ignore_errors=True)

    def _path(self, name: str) -> Path:
        """Where a file is written; folders that its name has are made."""
        path = self.work / name
        if path.parent != self.work and not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            for folder in (path.parent, *path.parent.relative_to(self.work).parents):
                FILES.sync_folder(self.work / folder)
        return path

    def put(self, name: str, data: bytes) -> None:
        """Write a small file durably, in the place of one that an earlier call left."""
        with self._path(name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


class Checked:
    """A new file that is written in order, with the length and the CRC32C of what was written."""

    def __init__(self, file: BinaryIO, progress: Progress) -> None:
        self.file, self.progress, self.nbytes, self.value = file, progress, 0, 0

    def write(self, data: Any) -> int:
        """Append ``data``, any buffer."""
        view = memoryview(data).cast("B")
        for at in range(0, len(view), _BLOCK):
            block = view[at : at + _BLOCK]
            self.file.write(block)
            self.value = crc32c(block, self.value)
            self.nbytes += len(block)
            self.progress(len(block))
        return len(view)

    def flush(self) -> None:
        """Does nothing; torch.save calls this method."""


def split_into_files(pieces: Iterable[tuple[T, int]], file_bytes: int) -> list[list[T]]:
    """Pieces, each with its bytes, in the files that have them in order.

    A file has at most ``file_bytes``, or one piece. Without pieces there is one empty file.
    """
    files: list[list[T]] = [[]]
    filled = 0
    for piece, nbytes in pieces:
        if files[-1] and filled + nbytes > file_bytes:
            files.append([])
            filled = 0
        files[-1].append(piece)
        filled += nbytes
    return files


def file_crc32c(path: Path) -> tuple[int, int] | None:
    """Length and CRC32C of a file; None where there is none."""
    value = nbytes = 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                value, nbytes = crc32c(block, value), nbytes + len(block)
    except FileNotFoundError:
        return None
    return nbytes, value
