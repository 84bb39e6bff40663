"""The files of a source, and the units of work into which they are cut."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from corpus.documents.columns import column_units, open_zstd
from corpus.documents.megatron import is_megatron_index, megatron_units
from corpus.documents.unit import FileRef, Unit
from corpus.errors import InputError

_LINES = {".jsonl", ".ndjson"}
_COMPRESSED = {".gz", ".zst"}
_UNREAD = {".xz", ".bz2", ".zip", ".7z", ".tar", ".rar", ".lz4", ".br"}
_HEAD_BYTES = 8192
"""Binary files and those in UTF-16 are known by their beginning."""
_RANGE_BYTES = 32 << 20
"""A longer file of lines is cut into ranges of about this many bytes."""
_GROUP_BYTES, _GROUP_FILES = 8 << 20, 512
"""Short text files share a unit."""


@dataclass
class Found:
    """What a source holds."""

    files: list[tuple[Path, str]] = field(default_factory=list)
    """Files that are read: path and name, in the order of their documents."""
    skipped: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    """Files that are not read: name and bytes, by the reason."""

    def skip(self, reason: str, name: str, path: Path) -> None:
        """Count a file that is not read."""
        self.skipped.setdefault(reason, []).append((name, path.stat().st_size))


def find_files(source: str) -> Found:
    """The files of ``source``, ordered by path.

    Args:
        source: ``stdlib``, a folder (searched in depth), a file or a glob.

    Raises InputError where ``source`` does not exist, or a file cannot be read.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        left_out = {"site-packages", "dist-packages", "__pycache__"}
        paths = [
            path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts)
        ]
    else:
        root, paths = _paths(source)
    found = Found()
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        try:
            if reason := _why_not(path, hidden=name.startswith(".") or "/." in name):
                found.skip(reason, name, path)
            else:
                found.files.append((path, name))
        except OSError as error:
            raise InputError(f"data.source: {path} cannot be read: {error.strerror}") from None
    return found


def _paths(source: str) -> tuple[Path, list[Path]]:
    path = Path(source)
    if path.is_dir():
        return path, [p for p in path.rglob("*") if p.is_file()]
    if path.is_file():
        return path.parent, [path]
    if glob.has_magic(source):
        found = [Path(match) for match in glob.glob(source, recursive=True)]  # noqa: PTH207
        # Names start below the part without wildcards.
        fixed = []
        for part in path.parts:
            if glob.has_magic(part):
                break
            fixed.append(part)
        return Path(*fixed), [p for p in found if p.is_file()]
    raise InputError(
        f"data.source ({source}) must be stdlib, or a folder, file or glob that exists"
    )


def _why_not(path: Path, hidden: bool) -> str:
    """Why a file is not read; empty where it is."""
    if hidden:
        return "hidden files"
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head:
        return "empty files"
    if path.suffix in _UNREAD:
        return f"{path.suffix} files, a compression that is not read"
    if path.suffix == ".idx" and is_megatron_index(path):
        return ""
    if path.suffix == ".bin" and is_megatron_index(path.with_suffix(".idx")):
        return "" if path.with_suffix(".idx").exists() else "binary files"
    if path.name in {"dataset_info.json", "state.json"}:
        beside = path.parent
        if (beside / "state.json").exists() and any(beside.glob("*.arrow")):
            return "metadata of a Hugging Face dataset"
    if path.suffix in {".parquet", ".arrow"}:
        return ""
    if path.suffix in _COMPRESSED:
        head = _uncompressed_head(path)
    if b"\0" in head:
        utf16 = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return "files in UTF-16, an encoding that is not read" if utf16 else "binary files"
    return ""


def _uncompressed_head(path: Path) -> bytes:
    """The beginning of a compressed file's text; nothing where it cannot be read, which whoever
    reads the file says."""
    with suppress(EOFError, zlib.error, OSError, InputError), open_raw(path) as stream:
        return stream.read(_HEAD_BYTES)
    return b""


def open_raw(path: Path) -> io.BufferedReader:
    """The bytes of a file's text, uncompressed."""
    if path.suffix == ".gz":
        return cast(io.BufferedReader, gzip.open(path))
    return open_zstd(path) if path.suffix == ".zst" else path.open("rb")


Kind = Literal["text", "lines", "parquet", "arrow", "megatron"]


def kind_of(path: Path) -> Kind | None:
    """How a file is read; None for the half of a Megatron dataset that its other half names."""
    suffix = Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix
    if suffix in _LINES:
        return "lines"
    if path.suffix == ".parquet":
        return "parquet"
    if path.suffix == ".arrow":
        return "arrow"
    if path.suffix in {".bin", ".idx"} and is_megatron_index(path.with_suffix(".idx")):
        return "megatron" if path.suffix == ".bin" else None
    return "text"


def cut_into_units(files: Iterable[tuple[Path, str]], text_field: str) -> Iterator[Unit]:
    """The units of work, in the order of their documents, whatever the number of processes.

    Raises InputError where a file cannot be read.
    """
    small: list[FileRef] = []

    def flush() -> Iterator[Unit]:
        if small:
            yield Unit("text", tuple(small))
            small.clear()

    for path, name in files:
        kind = kind_of(path)
        if kind is None:
            continue
        try:
            one = FileRef.of(path, name)
            if kind == "text" and path.suffix not in _COMPRESSED:
                if small and (
                    len(small) == _GROUP_FILES
                    or one.size + sum(each.size for each in small) > _GROUP_BYTES
                ):
                    yield from flush()
                small.append(one)
                continue
            yield from flush()
            yield from _units_of(kind, one, text_field)
        except OSError as error:
            raise InputError(f"data.source: {path} cannot be read: {error.strerror}") from None
    yield from flush()


def _units_of(kind: Kind, file: FileRef, text_field: str) -> Iterator[Unit]:
    path = Path(file.path)
    if kind == "megatron":
        yield from megatron_units(file)
    elif kind in ("parquet", "arrow"):
        yield from column_units(kind, file, text_field)
    elif kind == "lines" and path.suffix not in _COMPRESSED and file.size > _RANGE_BYTES:
        yield from _ranges(file)
    else:
        yield Unit(kind, (file,))


def _ranges(file: FileRef) -> Iterator[Unit]:
    """Ranges of whole lines."""
    start = number = 0
    with Path(file.path).open("rb") as handle:
        while start < file.size:
            handle.seek(start)
            lines, at = 0, start
            while at < file.size and at - start < _RANGE_BYTES:
                block = handle.read(min(1 << 20, start + _RANGE_BYTES - at))
                lines += block.count(b"\n")
                at += len(block)
            stop, ended = at, False
            while not ended and (rest := handle.readline(1 << 20)):
                stop, ended = stop + len(rest), rest.endswith(b"\n")
            lines += ended
            yield Unit("lines", (file,), start, stop, number)
            start, number = stop, number + lines


def skipped_as_json(skipped: dict[str, list[tuple[str, int]]]) -> dict[str, Any]:
    """Counts, bytes and the first names, by the reason."""
    return {
        reason: {
            "files": len(files),
            "bytes": sum(size for _, size in files),
            "names": [name for name, _ in files[:3]],
        }
        for reason, files in sorted(skipped.items())
    }
