"""Packed sequences in one global order that no rank count changes.

Legend: B batch, S sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pretrain.corpus import CorpusManifest, DataConfig
from pretrain.errors import InputError


class PackedSequences:
    """The sequences of one split: S tokens each, documents end to end, read through mmap.

    Sequence i of a shard is its tokens [i·S, i·S + S], one more than S, since each token but the
    first is a target; what is left over at a shard's end is not used. With ``whole`` it is used
    too, as a last sequence filled up with -1, so that every token is a target once.

    Raises InputError where a file is not as long as the manifest says, or no sequence fits.
    """

    def __init__(
        self,
        data: DataConfig,
        corpus: CorpusManifest,
        split: Literal["train", "val"],
        whole: bool = False,
    ) -> None:
        self.seq_len = S = data.seq_len
        self._shards: list[np.memmap] = []
        shards = corpus.train if split == "train" else corpus.val
        itemsize = np.dtype(corpus.dtype).itemsize
        for shard in shards:
            path = Path(data.path) / shard.file
            found = path.stat().st_size if path.exists() else 0
            if found != shard.tokens * itemsize:
                raise InputError(
                    f"corpus file {path} has {found} bytes, its manifest says "
                    f"{shard.tokens * itemsize}; remove {data.path} to prepare it anew"
                )
            self._shards.append(np.memmap(path, dtype=corpus.dtype, mode="r"))
        round_up = S - 1 if whole else 0
        counts = [(shard.tokens - 1 + round_up) // S for shard in shards]
        self._ends = np.cumsum(counts)
        if not sum(counts):
            longest = max(shard.tokens for shard in shards)
            raise InputError(
                f"data.seq_len ({S}) must be less than the tokens of the longest {split} shard "
                f"({longest}); lower it or add text"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        """Int64 tokens [S + 1] of one sequence, in the order of the files."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[shard - 1]) if shard else 0
        start = (index - first) * self.seq_len
        tokens = self._shards[shard][start : start + self.seq_len + 1].astype(np.int64)
        missing = self.seq_len + 1 - len(tokens)
        return np.pad(tokens, (0, missing), constant_values=-1) if missing else tokens

    def batch(self, indices: list[int]) -> Tensor:
        """[len(indices), S + 1] int64; no indices are an ordinary, empty batch."""
        rows = [self[index] for index in indices]
        return torch.from_numpy(np.stack(rows) if rows else np.empty((0, self.seq_len + 1), int))


class GlobalOrder:
    """Which sequence has which sample index, for ever: a fresh permutation every epoch.

    The permutation is a four-round Feistel network over the next power of four, walked until it
    falls in range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 3):
    any position is found at once, in no memory, on every rank alike.
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        assert num_sequences >= 1
        self.num_sequences, self.seed = num_sequences, seed
        self._half = max(1, -(-(num_sequences - 1).bit_length() // 2))

    def __getitem__(self, sample_index: int) -> int:
        """The sequence at a position in the global order, which has no end."""
        epoch, value = divmod(sample_index, self.num_sequences)
        while True:
            value = self._encrypt(value, epoch)
            if value < self.num_sequences:
                return value

    def _encrypt(self, value: int, epoch: int) -> int:
        mask = (1 << self._half) - 1
        left, right = value >> self._half, value & mask
        for turn in range(4):
            key = f"{self.seed}/{epoch}/{turn}/{right}".encode()
            digest = hashlib.blake2b(key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
        return left << self._half | right


@dataclass(frozen=True)
class Cursor:
    """The next sample index: all that a resume needs to know of the data."""

    sample_index: int = 0


def micro_batches(
    cursor: Cursor, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[range]:
    """The sample indices of this rank's micro-batches in the step that starts at ``cursor``.

    Micro-batch j of a step is its samples [j·m, (j+1)·m), whatever the ranks are; rank r takes
    every dp_size-th of them. Where they do not divide, some ranks end with empty ones, so that all
    join the same collectives.
    """
    start, stop = cursor.sample_index, cursor.sample_index + global_batch_size
    starts = list(range(start, stop, micro_batch_size))
    rounds = -(-len(starts) // dp_size)
    mine = []
    for turn in range(rounds):
        j = turn * dp_size + dp_rank
        first = starts[j] if j < len(starts) else stop
        mine.append(range(first, min(first + micro_batch_size, stop)))
    return mine


class Loader:
    """Gives ``(micro-batches of a step, the cursor after it)``; state travels with the data."""

    def __init__(
        self,
        sequences: PackedSequences,
        order: GlobalOrder,
        batch_size: Callable[[int], int],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
    ) -> None:
        self.sequences, self.order = sequences, order
        # Of the step that begins at a sample index.
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size

    def step(self, cursor: Cursor) -> tuple[list[Tensor], Cursor]:
        """The micro-batches [b, S + 1] of the step at ``cursor``."""
        size = self.batch_size(cursor.sample_index)
        ranges = micro_batches(cursor, size, self.micro_batch_size, self.dp_rank, self.dp_size)
        batches = [self.sequences.batch([self.order[i] for i in r]) for r in ranges]
        return batches, Cursor(cursor.sample_index + size)
