"""How well gzip and xz compress the text that a corpus holds out."""

from __future__ import annotations

import gzip
import io
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from tokenizers import Tokenizer

from corpus.manifest import Shard
from corpus.prepare.parts import PartSettings
from corpus.tokenizer import end_of_document

_COMPRESSED_BYTES = 64 << 20
"""gzip and xz are given at most this much text."""
_PIECE_BYTES = 1 << 18
"""What they are given at a time: a signal waits for it."""
_DOCUMENTS = 64
"""Documents that are decoded at a time."""


class _Counter(io.RawIOBase):
    def __init__(self) -> None:
        self.count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.count += len(data)
        return len(data)


def compressed_sizes(
    folder: Path, shards: Sequence[Shard], tokenizer: Tokenizer, settings: PartSettings
) -> tuple[int, int, int]:
    """Bytes of the held-out documents, one after the other, and their bytes under gzip -9 and
    under xz -9; of a long text the first part."""
    end, rest, size = end_of_document(tokenizer, settings.end_token), np.empty(0, int), 0
    gzipped, xzipped = _Counter(), _Counter()
    with (
        gzip.GzipFile(fileobj=gzipped, mode="wb", compresslevel=9, mtime=0) as g,
        lzma.LZMAFile(cast(BinaryIO, xzipped), mode="wb", preset=9) as x,
    ):
        for shard in shards:
            if size >= _COMPRESSED_BYTES:
                break
            tokens = np.fromfile(folder / shard.file, settings.dtype)
            tokens = np.concatenate([rest, tokens.astype(int)])
            *documents, rest = np.split(tokens, np.flatnonzero(tokens == end) + 1)
            for raw in _texts(tokenizer, documents):
                piece = raw[: _COMPRESSED_BYTES - size]
                size += len(piece)
                g.write(piece)
                x.write(piece)
    return size, gzipped.count, xzipped.count


def _texts(tokenizer: Tokenizer, documents: Sequence[np.ndarray]) -> Iterator[bytes]:
    """The texts of documents, end to end, in pieces."""
    for first in range(0, len(documents), _DOCUMENTS):
        lists = [ids[:-1].tolist() for ids in documents[first : first + _DOCUMENTS]]
        for text in tokenizer.decode_batch(lists, skip_special_tokens=False):
            raw = text.encode()
            for start in range(0, len(raw), _PIECE_BYTES):
                yield raw[start : start + _PIECE_BYTES]
