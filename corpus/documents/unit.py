"""A unit of work: some files, or a part of one file, that one process reads."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileRef:
    """A file as it was when the source was searched."""

    path: str
    name: str
    """Relative to the source; the names of documents begin with it."""
    size: int
    changed_ns: int
    """The time of the last change, in nanoseconds since 1970."""

    @classmethod
    def of(cls, path: Path, name: str) -> FileRef:
        """The file as it is now."""
        stat = path.stat()
        return cls(str(path.absolute()), name, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class Unit:
    """Documents that one process reads in one go."""

    kind: str
    """``text``, ``lines``, ``parquet``, ``arrow`` or ``megatron``."""
    files: tuple[FileRef, ...]
    start: int = 0
    """Where the part begins: a byte of lines, a row group of Parquet, a document of Megatron."""
    stop: int = -1
    """Where the part ends; -1 for the end of the file."""
    first: int = 0
    """The number of documents or lines of the file before the part."""
    rows: int = 0
    """Rows or documents of the part, where they are known."""

    @property
    def bytes(self) -> int:
        """About the bytes that are read, for the progress."""
        size = sum(file.size for file in self.files)
        return min(self.stop - self.start, size) if self.kind == "lines" and self.stop > 0 else size

    def key(self, settings: str) -> str:
        """Equal for equal files and settings: a part that was made under this key is used again."""
        text = json.dumps([asdict(self), settings], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
