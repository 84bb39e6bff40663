"""The documents of a unit of work, and which of them are held out."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, cast

import numpy as np

from pretrain.data.columns import column_documents, open_zstd
from pretrain.data.files import cut_into_units, find_files
from pretrain.data.megatron import megatron_documents
from pretrain.data.unit import FileRef, Unit
from pretrain.errors import InputError

HELD_OUT_EVERY = 20


@dataclass(frozen=True)
class Document:
    """One text, or one document that is tokenized already."""

    name: str
    """Relative path, with ``#NUMBER`` for a line or a row, from 1."""
    text: str = ""
    ids: np.ndarray | None = None
    """Token ids, where the source has tokens."""
    replaced: bool = False
    """Whether bytes that are not UTF-8 were replaced by U+FFFD."""

    @cached_property
    def hash(self) -> int:
        """The first 64 bits of the SHA-256 of the name, equal on every machine."""
        name = self.name.encode("utf-8", errors="surrogateescape")
        return int.from_bytes(hashlib.sha256(name).digest()[:8], "big")

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to train on."""
        return not self.text if self.ids is None else not len(self.ids)


def is_held_out(document: Document) -> bool:
    """Whether a document is in the validation split.

    About one document in 20 is, chosen by the hash of its name. A file that is added to the corpus
    does not move other documents from one split to the other.
    """
    return document.hash % HELD_OUT_EVERY == 0


def find_documents(source: str, text_field: str = "text") -> Iterator[Document]:
    """All documents of a source that are not empty, in order; see :func:`read_unit`."""
    for unit in cut_into_units(find_files(source).files, text_field):
        for document in read_unit(unit, text_field):
            if not document.is_empty:
                yield document


def read_unit(unit: Unit, text_field: str) -> Iterator[Document]:
    """The documents of a unit in order, empty ones too.

    Raises InputError where a file cannot be read or is cut off, or a line is no JSON object with a
    text in ``text_field``.
    """
    if unit.kind == "megatron":
        for name, ids in megatron_documents(unit):
            yield Document(name, ids=ids)
    elif unit.kind in ("parquet", "arrow"):
        for name, value in column_documents(unit, text_field):
            if isinstance(value, np.ndarray):
                yield Document(name, ids=value)
            else:
                text, broken = _encodable(value or "")
                yield Document(name, text, replaced=broken)
    else:
        for file in unit.files:
            with _readable(file) as stream:
                if unit.kind == "lines":
                    yield from _lines(file, stream, unit, text_field)
                else:
                    text, replaced = _decoded(stream.read())
                    yield Document(file.name, text, replaced=replaced)


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path))
    return open_zstd(path) if path.suffix == ".zst" else path.open("rb")


@contextmanager
def _readable(file: FileRef) -> Iterator[IO[bytes]]:
    path = Path(file.path)
    try:
        with _open(path) as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"data.source: {path} is cut off or damaged") from None
    except OSError as error:
        said = error.strerror or "it is cut off or damaged"
        raise InputError(f"data.source: {path} cannot be read: {said}") from None


def _lines(file: FileRef, stream: IO[bytes], unit: Unit, text_field: str) -> Iterator[Document]:
    left = None if unit.stop < 0 else unit.stop - unit.start
    if unit.start:
        stream.seek(unit.start)
    for number, line in enumerate(stream, unit.first + 1):
        if left is not None:
            if left <= 0:
                return
            left -= len(line)
        if not line.strip():
            continue
        decoded, replaced = _decoded(line)
        try:
            text = json.loads(decoded)[text_field]
        except (ValueError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise InputError(
                f"data.source: {file.path} line {number} must be a JSON object with a text in "
                f"the field {text_field} (data.text_field)"
            )
        text, broken = _encodable(text)
        yield Document(f"{file.name}#{number}", text, replaced=replaced or broken)


def _decoded(raw: bytes) -> tuple[str, bool]:
    """The text, and whether bytes that are not UTF-8 were replaced."""
    try:
        return raw.decode(), False
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), True


def _encodable(text: str) -> tuple[str, bool]:
    """The text without halves of surrogate pairs, which JSON can spell and UTF-8 cannot encode."""
    raw = text.encode(errors="replace")
    return raw.decode(), raw != text.encode(errors="surrogatepass")
