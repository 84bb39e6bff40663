"""Token shards cut into sequences of a fixed length."""

from __future__ import annotations

import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from ckpt.store import THREADS
from corpus.config import DataConfig, is_remote
from corpus.manifest import CorpusManifest, Shard
from pretrain.data.cache import CachedFile, ShardCache
from pretrain.errors import InputError

if TYPE_CHECKING:  # processes that prepare a corpus start without torch
    from torch import Tensor

_OPEN_SHARDS = 128
"""Shards that are mapped at a time: each takes a file handle."""


Indices = Sequence[int] | np.ndarray


class Sequences(Protocol):
    """Numbered sequences of S + 1 tokens."""

    seq_len: int

    def __len__(self) -> int:
        """How many there are."""

    def read(self, indices: Indices) -> np.ndarray:
        """The tokens of some sequences, int64 [len(indices), S + 1]; ``indices`` may be empty."""


def read_batch(sequences: Sequences, indices: Indices) -> Tensor:
    """The tokens of some sequences, int64 [len(indices), S + 1]; ``indices`` may be empty."""
    import torch

    return torch.from_numpy(sequences.read(indices))


def data_checksum(batches: Iterable[Tensor]) -> int:
    """The sum of the CRC-32 of each sequence: equal for equal sequences, however ranks and
    micro-batches share them. Sums of a step over ranks are exact in float64 up to 2^21 sequences.
    """
    return sum(zlib.crc32(row.numpy()) for batch in batches for row in batch)


def by_shard(numbers: np.ndarray) -> dict[int, list[int]]:
    """The shards in ``numbers``, each with its places there."""
    places: dict[int, list[int]] = {}
    for place, number in enumerate(numbers.tolist()):
        places.setdefault(number, []).append(place)
    return places


class ShardFiles:
    """The files of shards, mapped when they are first read.

    Args:
        data: its ``path`` is the folder.
        corpus: gives the dtype.
        shards: the files.
        dtype: of the entries; that of the corpus where None.
        cache: fetches the files of an object store, and keeps them.
    """

    def __init__(
        self,
        data: DataConfig,
        corpus: CorpusManifest,
        shards: Sequence[Shard],
        dtype: np.dtype | None = None,
        cache: ShardCache | None = None,
    ) -> None:
        self._place, self._shards = data.path, shards
        self.dtype = np.dtype(corpus.dtype) if dtype is None else dtype
        self._cache = cache if is_remote(data.path) else None
        self._open: OrderedDict[int, np.ndarray] = OrderedDict()

    def check_lengths(self) -> None:
        """Raise InputError where a file is not as long as the manifest says, or where the cache of
        an object store is too small for one. What is in an object store is checked when it is
        fetched."""
        if is_remote(self._place):
            largest = max((self._size(shard) for shard in self._shards), default=0)
            assert self._cache is not None
            if 2 * largest > self._cache.limit_bytes:
                raise InputError(
                    f"data.cache_gib ({self._cache.limit_bytes / (1 << 30):g}) must hold two of "
                    f"the largest shards of {self._place} ({largest / (1 << 30):.3g} GiB each)"
                )
            return
        for shard in self._shards:
            path, wanted = Path(self._place) / shard.file, self._size(shard)
            found = path.stat().st_size if path.exists() else 0
            if found != wanted:
                raise InputError(
                    f"corpus file {path} has {found} bytes, its manifest says {wanted}; remove "
                    f"{path.parent} to prepare it anew"
                )

    def in_turn(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """The entries of some shards, one after another. Those of an object store are fetched while
        earlier ones are read, and are not kept from removal when the next one is asked for."""
        if self._cache is None:
            yield from map(self._mapped, numbers)
            return
        files = [self._cached(self._shards[number]) for number in numbers]
        # Two are in use, and those that are fetched ahead: at most a half of the cache for these.
        largest = max([1, *(file.size for file in files)])
        ahead = max(0, self._cache.limit_bytes // (2 * largest) - 2)
        begun: deque[Callable[[], np.ndarray]] = deque()
        for file in files:
            begun.append(self._cache.begin(file))
            if len(begun) > min(ahead, THREADS):
                yield begun.popleft()().view(self.dtype)
        while begun:
            yield begun.popleft()().view(self.dtype)

    def _mapped(self, number: int) -> np.ndarray:
        found = self._open.get(number)
        if found is None:
            path = Path(self._place) / self._shards[number].file
            # As a plain array: a slice of a memmap takes ten times as long.
            found = self._open[number] = np.asarray(np.memmap(path, dtype=self.dtype, mode="r"))
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return found

    def _cached(self, shard: Shard) -> CachedFile:
        return CachedFile(self._place, shard.file, shard.sha256, self._size(shard))

    def _size(self, shard: Shard) -> int:
        return shard.tokens * self.dtype.itemsize


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
        cache: ShardCache | None = None,
    ) -> None:
        self.seq_len = S = data.seq_len
        shards = corpus.train if split == "train" else corpus.val
        self._shards = ShardFiles(data, corpus, shards, cache=cache)
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
        row: np.ndarray = self.read([index])[0]
        return row

    def read(self, indices: Indices) -> np.ndarray:
        """See :meth:`Sequences.read`."""
        wanted, length = np.asarray(indices, np.int64), self.seq_len + 1
        numbers = np.searchsorted(self._ends, wanted, side="right")
        starts = ((wanted - self._firsts[numbers]) * self.seq_len).tolist()
        shards = by_shard(numbers)
        # Rows of the shards' own dtype first: all of them become int64 in one go, at half the cost.
        rows = np.empty((len(wanted), length), self._shards.dtype)
        ends: dict[int, int] = {}
        each = zip(shards.values(), self._shards.in_turn(list(shards)), strict=True)
        for places, entries in each:
            for place in places:
                tokens = entries[starts[place] : starts[place] + length]
                if len(tokens) == length:
                    rows[place] = tokens
                else:
                    rows[place, : len(tokens)] = tokens
                    ends[place] = len(tokens)
        found = rows.astype(np.int64)
        for place, end in ends.items():
            found[place, end:] = -1
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

    def read(self, indices: Indices) -> np.ndarray:
        """See :meth:`Sequences.read`."""
        wanted = np.asarray(indices, np.int64)
        found = np.empty((len(wanted), self.seq_len + 1), np.int64)
        sources = np.searchsorted(self._ends, wanted, side="right")
        for number in np.unique(sources):
            places = np.flatnonzero(sources == number)
            first = int(self._ends[number - 1]) if number else 0
            found[places] = self.each[number].read(wanted[places] - first)
        return found


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

    def read(self, indices: Indices) -> np.ndarray:
        """See :meth:`Sequences.read`."""
        found = self.sequences.read(indices)
        targets = found[:, 1:]
        np.invert(targets, out=targets, where=(found[:, :-1] == self.end_token) & (targets >= 0))
        return found
