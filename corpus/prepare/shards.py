"""Parts to shards: documents that stay, in order, in files of equal length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from corpus.manifest import Shard
from corpus.prepare.parts import DOCUMENT

_TOKENS_AT_ONCE = 1 << 22


def read_documents(parts: Sequence[Path]) -> np.ndarray:
    """A :data:`DOCUMENT` for each document of all parts, in order."""
    return np.concatenate(
        [np.empty(0, DOCUMENT)]
        + [np.fromfile(part.with_suffix(".documents"), DOCUMENT) for part in parts]
    )


def first_of_equal(documents: np.ndarray) -> np.ndarray:
    """A mask of the documents whose text no earlier document has: bool [documents]."""
    mask = np.zeros(len(documents), dtype=bool)
    if len(documents):
        contents = np.ascontiguousarray(documents["content"]).view("V16").reshape(-1)
        mask[np.unique(contents, return_index=True)[1]] = True
    return mask


class ShardWriter:
    """Writes the tokens of one split into shards of ``shard_tokens``, the last one shorter.

    Args:
        folder: where.
        split: begins the names.
        shard_tokens: tokens of a shard.
        digest: is given all bytes, in order.
    """

    def __init__(
        self, folder: Path, split: str, shard_tokens: int, digest: Callable[[bytes], None]
    ) -> None:
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self._digest = digest
        self.shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._hash, self._ends, self._tokens = hashlib.sha256(), [np.empty(0, "<i8")], 0

    def write(self, tokens: np.ndarray, ends: np.ndarray) -> None:
        """Append tokens.

        Args:
            tokens: of the split's dtype.
            ends: int64, in ``tokens``, one past the last token of each document that ends there.
        """
        at = 0
        while at < len(tokens):
            if self._file is None:
                self._file = (self.folder / self._name).open("wb")
            stop = min(len(tokens), at + self.shard_tokens - self._tokens)
            raw = np.ascontiguousarray(tokens[at:stop]).tobytes()
            self._file.write(raw)
            self._hash.update(raw)
            self._digest(raw)
            here = ends[(ends > at) & (ends <= stop)]
            self._ends.append(here - at + self._tokens)
            self._tokens += stop - at
            at = stop
            if self._tokens == self.shard_tokens:
                self._end_shard()

    def close(self) -> list[Shard]:
        """End the last shard; all shards."""
        if self._file is not None:
            self._end_shard()
        return self.shards

    @property
    def _name(self) -> str:
        return f"{self.split}-{len(self.shards):05d}.bin"

    def _end_shard(self) -> None:
        assert self._file is not None
        self._file.close()
        self._file = None
        ends = np.concatenate(self._ends).astype("<i8")
        raw = ends.tobytes()
        (self.folder / self._name).with_suffix(".ends").write_bytes(raw)
        self.shards.append(
            Shard(
                file=self._name,
                tokens=self._tokens,
                documents=len(ends),
                sha256=self._hash.hexdigest(),
                ends_sha256=hashlib.sha256(raw).hexdigest(),
            )
        )
        self._hash, self._ends, self._tokens = hashlib.sha256(), [np.empty(0, "<i8")], 0


def write_split(
    writer: ShardWriter, parts: Sequence[Path], documents: np.ndarray, kept: np.ndarray, dtype: str
) -> list[Shard]:
    """Write the documents of ``kept``, a mask over the documents of all parts, in order."""
    at = 0
    for part in parts:
        count = part.with_suffix(".documents").stat().st_size // DOCUMENT.itemsize
        mine, sizes = kept[at : at + count], documents["tokens"][at : at + count]
        at += count
        if not mine.any():
            continue
        tokens = np.memmap(part.with_suffix(".tokens"), dtype=dtype, mode="r")
        stops = np.cumsum(sizes)
        # Runs of documents that stay, in blocks of bounded size.
        chosen = np.flatnonzero(mine)
        breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
        for run in np.split(chosen, breaks):
            for block in _blocks(run, sizes):
                start = int(stops[block[0]] - sizes[block[0]])
                stop = int(stops[block[-1]])
                writer.write(tokens[start:stop], stops[block] - start)
    return writer.close()


def _blocks(run: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    before = np.cumsum(sizes[run]) - sizes[run]
    cuts = np.flatnonzero(np.diff(before // _TOKENS_AT_ONCE)) + 1
    return np.split(run, cuts)
