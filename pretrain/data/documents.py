"""The documents of a corpus: files, and lines of JSONL files."""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pretrain.errors import InputError

HELD_OUT_EVERY = 20


@dataclass(frozen=True)
class Document:
    """One text: a file, or the ``text`` of one line of a JSONL file."""

    name: str
    """Relative path, with ``#LINE`` for a line of JSONL."""
    path: Path
    offset: int = -1
    """The byte at which the line begins; -1 for a whole file."""

    @cached_property
    def hash(self) -> int:
        """The first 64 bits of the SHA-256 of the name, equal on every machine."""
        name = self.name.encode("utf-8", errors="surrogateescape")
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "big")

    def read(self) -> str:
        """The text. Bytes that are not UTF-8 are replaced by U+FFFD."""
        if self.offset < 0:
            return self.path.read_bytes().decode("utf-8", errors="replace")
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = str(json.loads(file.readline())["text"])
        # JSON can spell one half of a surrogate pair, which UTF-8 cannot encode.
        return text.encode("utf-8", errors="replace").decode()


def is_held_out(document: Document) -> bool:
    """Whether a document is in the validation split.

    About one document in 20 is, chosen by the hash of its name. A file that is added to the corpus
    does not move other documents from one split to the other.
    """
    return document.hash % HELD_OUT_EVERY == 0


def find_documents(source: str) -> list[Document]:
    """The documents of ``source``, ordered by name, without empty texts and binary files.

    Args:
        source: ``stdlib``, a folder (searched in depth, hidden files left out), a file or a glob.
            A ``.jsonl`` file has one document a line: a JSON object with the key ``text``.

    Raises:
        InputError: where ``source`` does not exist, a file cannot be read, or a line of a
            ``.jsonl`` file is no JSON object with a ``text``.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        skipped = {"site-packages", "dist-packages", "__pycache__"}
        paths = [
            path for path in root.rglob("*.py") if not skipped & set(path.relative_to(root).parts)
        ]
    else:
        root, paths = _find_files(source)
    documents: list[Document] = []
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        try:
            if path.suffix == ".jsonl":
                documents += _jsonl_documents(path, name)
            elif _is_text(path):
                documents.append(Document(name, path))
        except OSError as error:
            raise InputError(f"data.source: {path} cannot be read: {error.strerror}") from None
    return documents


def _find_files(source: str) -> tuple[Path, list[Path]]:
    path = Path(source)
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file()]
        visible = [p for p in found if not any(x[0] == "." for x in p.relative_to(path).parts)]
        return path, visible
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


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(8192)
    return bool(head) and b"\0" not in head


def _jsonl_documents(path: Path, name: str) -> Iterator[Document]:
    with path.open("rb") as file:
        offset = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise InputError(
                        f"data.source: {path} line {number} must be a JSON object with a text"
                    )
                if text:
                    yield Document(f"{name}#{number}", path, offset)
            offset += len(line)
