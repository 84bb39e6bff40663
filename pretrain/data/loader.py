"""Packed sequences in one global order that no rank count changes.

Legend: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pretrain.data.order import GlobalOrder
from pretrain.data.sequences import PackedSequences


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
