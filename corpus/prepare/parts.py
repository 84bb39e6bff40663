"""Parts: what one process makes of one unit, in files that a later start finds again.

A part is three files in the folder of a preparation, all under ``NUMBER-KEY``: ``.tokens`` with the
token ids of its documents end to end, ``.documents`` with a :data:`DOCUMENT` for each, and
``.json`` with counts, which is written last. The key stands for the unit's files as they are and
for all settings: a part of anything else has another name.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from corpus.config import ChatConfig, FilterConfig
from corpus.documents import Document, Unit, is_held_out, read_unit
from corpus.errors import InputError
from corpus.prepare.conversations import ConversationEncoder
from corpus.tokenizer import bytes_per_token, end_of_document

DOCUMENT = np.dtype(
    [
        ("tokens", "<i8"),
        ("bytes", "<i8"),
        ("name", "<u8"),
        ("held_out", "?"),
        ("content", "<u8", 2),
    ]
)
"""A document of a part: tokens with the end token, bytes of text, the hash of its name, whether it
is held out, and 128 bits of the SHA-256 of its text."""
_BATCH, _BATCH_SIZE = 512, 1 << 20
"""Documents that are tokenized at a time, and about their characters or tokens: a tokenizer takes
some hundred bytes for each."""


@dataclass(frozen=True)
class PartSettings:
    """What the tokens of a part depend on, besides its files."""

    tokenizer: str
    """The file of the tokenizer."""
    tokenizer_fingerprint: str
    vocab_size: int
    end_token: str
    dtype: str
    text_field: str
    chat: dict[str, Any] | None
    filter: dict[str, Any]
    folder: str
    """Where parts are written."""

    @property
    def text(self) -> str:
        """All of it but places, for the key of a part."""
        values = asdict(self)
        del values["tokenizer"], values["folder"]
        return json.dumps(values, sort_keys=True)


@dataclass
class PartCounts:
    """What became of the documents of a part."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    replaced: int = 0
    """Documents with bytes that are not UTF-8."""
    left_out: dict[str, list[int]] = field(default_factory=dict)
    """Documents and their bytes, by the reason."""

    def leave_out(self, reason: str, size: int) -> None:
        """Count a document that the part does not have."""
        counts = self.left_out.setdefault(reason, [0, 0])
        counts[0] += 1
        counts[1] += size


def part_path(folder: Path, number: int, unit: Unit, settings: PartSettings) -> Path:
    """The part of a unit, without the suffix of its files."""
    return folder / f"{number:06d}-{unit.key(settings.text)}"


def read_part(path: Path) -> PartCounts | None:
    """The counts of a part that is whole; None where it must be made."""
    try:
        counts = json.loads(path.with_suffix(".json").read_bytes())
        sizes: dict[str, int] = counts.pop("sizes")
        is_whole = all(path.with_suffix(s).stat().st_size == size for s, size in sizes.items())
        return PartCounts(**counts) if is_whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


class PartWriter:
    """Makes parts, one after the other.

    Args:
        settings: equal for all parts of a corpus.
    """

    def __init__(self, settings: PartSettings) -> None:
        self.settings = settings
        self.tokenizer = Tokenizer.from_file(settings.tokenizer)
        self.tokenizer.encode_special_tokens = True
        self.end = end_of_document(self.tokenizer, settings.end_token)
        self.filter = FilterConfig(**settings.filter)
        self.chat = None if settings.chat is None else ChatConfig(**settings.chat)
        if self.chat is not None:
            self.conversations = ConversationEncoder(self.tokenizer.to_str())
        self._lengths: np.ndarray | None = None

    def make(self, number: int, unit: Unit) -> PartCounts:
        """Write the part of a unit, and return its counts.

        Raises InputError where the unit cannot be read, and OSError where the part cannot be
        written.
        """
        counts = PartCounts()
        path = part_path(Path(self.settings.folder), number, unit, self.settings)
        drafts = {s: path.with_suffix(f"{s}.{secrets.token_hex(4)}") for s in (".tokens",
                  ".documents", ".json")}  # fmt: skip
        try:
            with drafts[".tokens"].open("wb") as tokens, drafts[".documents"].open("wb") as records:
                for ids, documents in self._batches(unit, counts):
                    tokens.write(ids.tobytes())
                    records.write(documents.tobytes())
                for file in (tokens, records):
                    file.flush()
                    os.fsync(file.fileno())
            sizes = {s: drafts[s].stat().st_size for s in (".tokens", ".documents")}
            drafts[".json"].write_text(json.dumps({**asdict(counts), "sizes": sizes}))
            for suffix, draft in drafts.items():
                draft.replace(path.with_suffix(suffix))
        finally:
            for draft in drafts.values():
                draft.unlink(missing_ok=True)
        return counts

    def _batches(self, unit: Unit, counts: PartCounts) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        documents = self._kept(unit, counts)
        while batch := _batch(documents):
            rows = np.zeros(len(batch), DOCUMENT)
            encoded = iter(self._encoded(batch))
            pieces: list[np.ndarray] = []
            end = np.array([self.end], self.settings.dtype)
            for row, document in zip(rows, batch, strict=True):
                if document.ids is None:
                    ids = next(encoded).astype(self.settings.dtype)
                    raw = document.text.encode()
                    size = len(raw)
                else:
                    ids = self._checked(document)
                    raw, size = ids.tobytes(), int(self.lengths[ids].sum())
                    ids = ids[:-1] if ids[-1] == self.end else ids
                pieces += [ids, end]
                content = np.frombuffer(hashlib.sha256(raw).digest()[:16], "<u8")
                row["tokens"], row["bytes"], row["name"] = len(ids) + 1, size, document.hash
                row["held_out"], row["content"] = is_held_out(document), content
            ids = np.concatenate(pieces)
            counts.documents += len(batch)
            counts.tokens += len(ids)
            counts.bytes += int(rows["bytes"].sum())
            yield ids, rows

    def _encoded(self, batch: Sequence[Document]) -> Iterable[np.ndarray]:
        """The token ids of the documents that have none."""
        if self.chat is not None:
            return self.conversations.encode([d.conversation or () for d in batch])
        texts = [document.text for document in batch if document.ids is None]
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return (np.array(encoding.ids, self.settings.dtype) for encoding in encodings)

    def _kept(self, unit: Unit, counts: PartCounts) -> Iterator[Document]:
        for document in read_unit(unit, self.settings.text_field, self.chat):
            if document.too_long:
                counts.leave_out(document.too_long, document.too_long_bytes)
                continue
            if document.conversation == ():
                counts.leave_out("conversations without an answer", 0)
                continue
            if document.is_empty:
                counts.leave_out("empty", 0)
                continue
            reason = self.filter.reason(document.text) if document.ids is None else ""
            if reason:
                counts.leave_out(reason, len(document.text.encode()))
                continue
            counts.replaced += document.replaced
            yield document

    @property
    def lengths(self) -> np.ndarray:
        """The bytes of text of each token."""
        if self._lengths is None:
            settings = self.settings
            self._lengths = bytes_per_token(self.tokenizer, settings.vocab_size, settings.end_token)
        return self._lengths

    def _checked(self, document: Document) -> np.ndarray:
        assert document.ids is not None
        ids, most = document.ids, self.settings.vocab_size
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= most:
            raise InputError(
                f"data.source: {document.name} has the token {low if low < 0 else high}; tokens "
                f"must be from 0 up to, and without, model.vocab_size ({most})"
            )
        return ids.astype(self.settings.dtype)


def _batch(documents: Iterator[Document]) -> list[Document]:
    """The next documents; none at the end."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text if document.ids is None else document.ids)
        if len(batch) == _BATCH or size >= _BATCH_SIZE:
            break
    return batch
