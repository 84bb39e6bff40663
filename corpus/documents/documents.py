"""The documents of a unit of work, and which of them are held out."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from corpus.config import ChatConfig
from corpus.documents.columns import column_documents
from corpus.documents.conversation import Conversation, conversation_of, text_of
from corpus.documents.files import cut_into_units, find_files, open_raw
from corpus.documents.megatron import megatron_documents
from corpus.documents.unit import FileRef, Unit
from corpus.errors import InputError

HELD_OUT_EVERY = 20
DOCUMENT_BYTES = 8 << 20
"""A longer text, or line of JSON, is left out: a tokenizer takes some hundred times its memory. No
more of it is ever in memory. The same number of tokens bounds a document that is tokenized."""
_PIECE_BYTES = 1 << 20
"""What is read at a time of a line that is left out."""


@dataclass(frozen=True)
class Document:
    """One text, or one document that is tokenized already."""

    name: str
    """Relative path, with ``#NUMBER`` for a line or a row, from 1."""
    text: str = ""
    ids: np.ndarray | None = None
    """Token ids, where the source has tokens."""
    conversation: Conversation | None = None
    """The pieces of ``text``, where documents are conversations; none without an answer."""
    replaced: bool = False
    """Whether bytes that are not UTF-8 were replaced by U+FFFD."""
    too_long: str = ""
    """Why a document is longer than the bound; it then has neither text nor ids."""
    too_long_bytes: int = 0
    """Its bytes; of a compressed text, those that were read."""

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


def read_unit(unit: Unit, text_field: str, chat: ChatConfig | None = None) -> Iterator[Document]:
    """The documents of a unit in order, empty ones too.

    Raises InputError where a file cannot be read or is cut off, or a line is no JSON object with a
    text in ``text_field``, or with messages where ``chat`` says how they are written.
    """
    if chat is not None and unit.kind != "lines":
        raise InputError(
            f"data.source: {unit.files[0].path} must be lines of JSON (.jsonl) with [data.chat]"
        )
    if unit.kind == "megatron":
        for name, ids in megatron_documents(unit):
            yield _tokenized(name, ids)
    elif unit.kind in ("parquet", "arrow"):
        for name, value in column_documents(unit, text_field, DOCUMENT_BYTES):
            if isinstance(value, np.ndarray):
                yield _tokenized(name, value)
            elif isinstance(value, int):
                yield _too_long(name, value)
            else:
                text, broken = _encodable(value or "")
                yield Document(name, text, replaced=broken)
    else:
        for file in unit.files:
            with _readable(file) as stream:
                if unit.kind == "lines":
                    yield from _lines(file, stream, unit, text_field, chat)
                else:
                    yield _whole(file, stream)


def _too_long(name: str, size: int) -> Document:
    reason = f"longer than {DOCUMENT_BYTES / (1 << 20):g} MiB"
    return Document(name, too_long=reason, too_long_bytes=size)


def _tokenized(name: str, ids: np.ndarray) -> Document:
    if len(ids) > DOCUMENT_BYTES:
        reason = f"more than {DOCUMENT_BYTES:,} tokens"
        return Document(name, too_long=reason, too_long_bytes=ids.nbytes)
    return Document(name, ids=ids)


def _whole(file: FileRef, stream: io.BufferedReader) -> Document:
    _skip_mark(stream)
    raw = stream.read(DOCUMENT_BYTES + 1)
    if len(raw) > DOCUMENT_BYTES:
        return _too_long(file.name, max(len(raw), file.size))
    text, replaced = _decoded(raw)
    return Document(file.name, text, replaced=replaced)


def _skip_mark(stream: io.BufferedReader) -> int:
    """Pass over UTF-8's byte-order mark, where a file begins with one; its bytes."""
    mark = codecs.BOM_UTF8
    return len(stream.read(len(mark))) if stream.peek(len(mark)).startswith(mark) else 0


@contextmanager
def _readable(file: FileRef) -> Iterator[io.BufferedReader]:
    path = Path(file.path)
    try:
        with open_raw(path) as stream:
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise InputError(f"data.source: {path} is cut off or damaged") from None
    except OSError as error:
        said = error.strerror or "it is cut off or damaged"
        raise InputError(f"data.source: {path} cannot be read: {said}") from None


def _lines(
    file: FileRef,
    stream: io.BufferedReader,
    unit: Unit,
    text_field: str,
    chat: ChatConfig | None,
) -> Iterator[Document]:
    at, number = unit.start, unit.first
    if unit.start:
        stream.seek(unit.start)
    else:
        at += _skip_mark(stream)
    while unit.stop < 0 or at < unit.stop:
        line = stream.readline(DOCUMENT_BYTES + 1)
        if not line:
            return
        number += 1
        size = len(line)
        if size > DOCUMENT_BYTES:
            size += _skip_line(line, stream)
            yield _too_long(f"{file.name}#{number}", size)
        at += size
        if size > DOCUMENT_BYTES or not line.strip():
            continue
        decoded, replaced = _decoded(line)
        try:
            value = json.loads(decoded)[text_field]
        except (ValueError, KeyError, TypeError):
            value = None
        name = f"{file.name}#{number}"
        where = f"{file.path} line {number}"
        if chat is not None and isinstance(value, list):
            yield _conversation(name, value, chat, replaced, where)
            continue
        if chat is not None:
            raise InputError(
                f"data.source: {where} must be a JSON object with a list of messages in the field "
                f"{text_field} (data.text_field)"
            )
        if not isinstance(value, str):
            raise InputError(
                f"data.source: {file.path} line {number} must be a JSON object with a text in "
                f"the field {text_field} (data.text_field)"
            )
        text, broken = _encodable(value)
        yield Document(name, text, replaced=replaced or broken)


def _conversation(
    name: str, value: object, chat: ChatConfig, replaced: bool, where: str
) -> Document:
    try:
        # A conversation without halves of surrogate pairs, as a text.
        plain, broken = _encodable(json.dumps(value, ensure_ascii=False))
        pieces = conversation_of(json.loads(plain), chat)
    except ValueError as error:
        raise InputError(f"data.source: {where}: {error}") from None
    return Document(name, text_of(pieces), conversation=pieces, replaced=replaced or broken)


def _skip_line(begin: bytes, stream: io.BufferedReader) -> int:
    """Read on to the end of a line, a piece at a time; the bytes that were read."""
    piece, size = begin, 0
    while piece and not piece.endswith(b"\n"):
        piece = stream.readline(_PIECE_BYTES)
        size += len(piece)
    return size


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
