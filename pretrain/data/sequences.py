"""Token shards cut into sequences of a fixed length."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pretrain.data.config import DataConfig
from pretrain.data.manifest import CorpusManifest
from pretrain.errors import InputError

if TYPE_CHECKING:  # processes that prepare a corpus start without torch
    from torch import Tensor


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
        """The tokens of one sequence, int64 [S + 1]; sequences are numbered through the shards."""
        shard = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[shard - 1]) if shard else 0
        start = (index - first) * self.seq_len
        tokens = self._shards[shard][start : start + self.seq_len + 1].astype(np.int64)
        missing = self.seq_len + 1 - len(tokens)
        return np.pad(tokens, (0, missing), constant_values=-1) if missing else tokens

    def batch(self, indices: list[int]) -> Tensor:
        """The tokens of some sequences, int64 [len(indices), S + 1]; ``indices`` may be empty."""
        import torch

        rows = [self[index] for index in indices]
        return torch.from_numpy(np.stack(rows) if rows else np.empty((0, self.seq_len + 1), int))
