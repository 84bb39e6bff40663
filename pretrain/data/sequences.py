"""Token shards as fixed-length sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pretrain.data.config import DataConfig
from pretrain.data.manifest import CorpusManifest
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
