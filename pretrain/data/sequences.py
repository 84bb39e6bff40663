"""Token shards cut into sequences of a fixed length."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from pretrain.data.config import DataConfig
from pretrain.data.manifest import CorpusManifest, Shard
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


class ShardFiles:
    """The files of shards, mapped when they are first read.

    Args:
        data: its ``path`` is the folder.
        corpus: gives the dtype.
        shards: the files.
        dtype: of the entries; that of the corpus where None.
    """

    def __init__(
        self,
        data: DataConfig,
        corpus: CorpusManifest,
        shards: Sequence[Shard],
        dtype: np.dtype | None = None,
    ) -> None:
        self._folder, self._shards = Path(data.path), shards
        self._dtype = np.dtype(corpus.dtype) if dtype is None else dtype
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()

    def check_lengths(self) -> None:
        """Raise InputError where a file is not as long as the manifest says."""
        for shard in self._shards:
            path, wanted = self._folder / shard.file, shard.tokens * self._dtype.itemsize
            found = path.stat().st_size if path.exists() else 0
            if found != wanted:
                raise InputError(
                    f"corpus file {path} has {found} bytes, its manifest says {wanted}; remove "
                    f"{self._folder} to prepare it anew"
                )

    def __getitem__(self, number: int) -> np.ndarray:
        """The entries of a shard."""
        found = self._open.get(number)
        if found is None:
            path = self._folder / self._shards[number].file
            # As a plain array: a slice of a memmap takes ten times as long.
            found = self._open[number] = np.asarray(np.memmap(path, dtype=self._dtype, mode="r"))
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return found


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
        shards = corpus.train if split == "train" else corpus.val
        self._shards = ShardFiles(data, corpus, shards)
        self._shards.check_lengths()
        round_up = S - 1 if whole else 0
        counts = [(shard.tokens - 1 + round_up) // S for shard in shards]
        self._ends = np.cumsum(counts)
        self._firsts = self._ends - counts
        if not sum(counts):
            longest = max((shard.tokens for shard in shards), default=0)
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
        wanted, length = np.asarray(indices, np.int64), self.seq_len + 1
        numbers = np.searchsorted(self._ends, wanted, side="right")
        starts = (wanted - self._firsts[numbers]) * self.seq_len
        for row, start, number in zip(out, starts.tolist(), numbers.tolist(), strict=True):
            tokens = self._shards[number][start : start + length]
            if len(tokens) == length:
                row[:] = tokens
            else:
                row[: len(tokens)] = tokens
                row[len(tokens) :] = -1

    def batch(self, indices: Indices) -> Tensor:
        """See :func:`read_batch`."""
        return read_batch(self, indices)


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


class WithoutBoundaryTargets:
    """Sequences in which the token after an end token is an input and no target.

    A token that is no target is stored as its bitwise complement, which is negative; -1, the
    complement of 0, is padding too.

    Args:
        sequences: the sequences.
        end_token: the id that ends a document.
    """

    def __init__(self, sequences: Sequences, end_token: int) -> None:
        self.sequences, self.seq_len, self.end_token = sequences, sequences.seq_len, end_token

    def __len__(self) -> int:
        return len(self.sequences)

    def read(self, indices: Indices, out: Rows) -> None:
        """See :meth:`Sequences.read`."""
        self.sequences.read(indices, out)
        for row in out:
            places = np.flatnonzero(row[:-1] == self.end_token) + 1
            row[places] = np.where(row[places] < 0, row[places], ~row[places])
