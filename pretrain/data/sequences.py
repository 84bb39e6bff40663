"""Token shards cut into sequences of a fixed length."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from pretrain.data.config import DataConfig
from pretrain.data.manifest import CorpusManifest
from pretrain.errors import InputError

if TYPE_CHECKING:  # processes that prepare a corpus start without torch
    from torch import Tensor

_OPEN_SHARDS = 128
"""Shards that are mapped at a time: each takes a file handle."""


Indices = Sequence[int] | np.ndarray
Rows = Sequence[np.ndarray] | np.ndarray


class Sequences(Protocol):
    """Numbered sequences of S + 1 tokens."""

    seq_len: int

    def __len__(self) -> int:
        """How many there are."""

    def read(self, indices: Indices, out: Rows) -> None:
        """Write the tokens of some sequences to ``out``: a row for each index, int64 [S + 1]."""


def read_batch(sequences: Sequences, indices: Indices) -> Tensor:
    """The tokens of some sequences, int64 [len(indices), S + 1]; ``indices`` may be empty."""
    import torch

    out = np.empty((len(indices), sequences.seq_len + 1), np.int64)
    sequences.read(indices, out)
    return torch.from_numpy(out)


def data_checksum(batches: Iterable[Tensor]) -> int:
    """The sum of the CRC-32 of each sequence: equal for equal sequences, however ranks and
    micro-batches share them. Sums of a step over ranks are exact in float64 up to 2^21 sequences.
    """
    return sum(zlib.crc32(row.numpy()) for batch in batches for row in batch)


class PackedSequences:
    """The sequences of one split, read through mmap. Documents follow each other without padding.

    Sequence i of a shard has the shard's tokens i·S to i·S + S, both included: S inputs, and S
    targets that are shifted by one token. Tokens left over at the end of a shard are not used. With
    ``whole`` they make a last sequence that is padded with -1, and every token of the shard but the
    first is a target once.

    Raises InputError where a file is not as long as the manifest says, or where no shard is long
    enough for a sequence.
    """

    def __init__(
        self,
        data: DataConfig,
        corpus: CorpusManifest,
        split: Literal["train", "val"],
        whole: bool = False,
    ) -> None:
        self.seq_len = S = data.seq_len
        self._shards, self._dtype = (corpus.train if split == "train" else corpus.val), corpus.dtype
        self._folder = Path(data.path)
        self._open: OrderedDict[int, np.memmap] = OrderedDict()
        itemsize = np.dtype(corpus.dtype).itemsize
        for shard in self._shards:
            path = self._folder / shard.file
            found = path.stat().st_size if path.exists() else 0
            if found != shard.tokens * itemsize:
                raise InputError(
                    f"corpus file {path} has {found} bytes, its manifest says "
                    f"{shard.tokens * itemsize}; remove {data.path} to prepare it anew"
                )
        round_up = S - 1 if whole else 0
        counts = [(shard.tokens - 1 + round_up) // S for shard in self._shards]
        self._ends = np.cumsum(counts)
        if not sum(counts):
            longest = max((shard.tokens for shard in self._shards), default=0)
            raise InputError(
                f"data.seq_len ({S}) must be less than the tokens of the longest {split} shard of "
                f"{data.path} ({longest}); lower it or add text"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        """The tokens of one sequence, int64 [S + 1]; sequences are numbered through the shards."""
        out = np.empty((1, self.seq_len + 1), np.int64)
        self.read([index], out)
        row: np.ndarray = out[0]
        return row

    def read(self, indices: Indices, out: Rows) -> None:
        """See :meth:`Sequences.read`."""
        numbers = np.searchsorted(self._ends, indices, side="right")
        for row, index, number in zip(out, indices, numbers.tolist(), strict=True):
            first = int(self._ends[number - 1]) if number else 0
            start = (int(index) - first) * self.seq_len
            tokens = self._shard(number)[start : start + self.seq_len + 1]
            row[: len(tokens)] = tokens
            row[len(tokens) :] = -1

    def batch(self, indices: Indices) -> Tensor:
        """See :func:`read_batch`."""
        return read_batch(self, indices)

    def _shard(self, number: int) -> np.memmap:
        found = self._open.get(number)
        if found is None:
            path = self._folder / self._shards[number].file
            found = self._open[number] = np.memmap(path, dtype=self._dtype, mode="r")
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return found


class ConcatenatedSequences:
    """The sequences of several sources, numbered one source after another.

    Args:
        each: the sources; all with one length of sequences.
    """

    def __init__(self, each: Sequence[Sequences]) -> None:
        assert each
        self.each, self.seq_len = list(each), each[0].seq_len
        self._ends = np.cumsum([len(one) for one in each])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Indices, out: Rows) -> None:
        """See :meth:`Sequences.read`."""
        wanted = np.asarray(indices, np.int64)
        sources = np.searchsorted(self._ends, wanted, side="right")
        for number in np.unique(sources):
            places = np.flatnonzero(sources == number)
            first = int(self._ends[number - 1]) if number else 0
            self.each[number].read(wanted[places] - first, [out[int(i)] for i in places])

    def batch(self, indices: Indices) -> Tensor:
        """See :func:`read_batch`."""
        return read_batch(self, indices)
