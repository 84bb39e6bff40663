"""Sequences that are their own numbers, so that a case sees which samples a step has.

Legend: S sequence length.
"""

from __future__ import annotations

import numpy as np

from pretrain.data import BlendedOrder, Cursor, GlobalOrder, Loader, Sequences

BATCH = 4
"""Samples of a step."""


class Numbered:
    """Sequences of which each has its own number as every token."""

    seq_len = 2

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def read(self, indices) -> np.ndarray:
        numbers = np.asarray(indices, np.int64) + self.first
        return np.repeat(numbers[:, None], self.seq_len + 1, axis=1)


def loader_of(
    sequences: Sequences,
    order: GlobalOrder | BlendedOrder,
    *,
    batch: int = BATCH,
    rank: int = 0,
    ranks: int = 1,
) -> Loader:
    """A loader as a start of a run makes it; micro-batches have one sample."""
    return Loader(sequences, order, lambda _: batch, 1, rank, ranks)


def started(count: int, seed: int = 3, **fields) -> Loader:
    """The loader of a new process over ``count`` numbered sequences: nothing is shared with
    another process."""
    return loader_of(Numbered(count), GlobalOrder(count, seed), **fields)


def numbers_of(batches) -> list[int]:
    """The numbers of the sequences of micro-batches."""
    return [int(row[0]) for batch in batches for row in batch]


def take(loader: Loader, cursor: Cursor, steps: int) -> tuple[list[int], Cursor]:
    """The numbers of the sequences of some steps, and the cursor after them."""
    taken: list[int] = []
    for _ in range(steps):
        batches, cursor = loader.step(cursor)
        taken += numbers_of(batches)
    return taken, cursor


def by_hand(count: int, samples: range, seed: int = 3) -> list[int]:
    """The sequences of some samples, looked up one by one."""
    order = GlobalOrder(count, seed)
    return [order[sample] for sample in samples]
