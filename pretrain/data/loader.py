"""The micro-batches of a step: packed sequences in a global order that no rank count changes.

    text files -> documents -> tokens in shard files -> sequences -> global order -> micro-batches

Legend: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pretrain.data.division import Division, equal_division
from pretrain.data.order import GlobalOrder
from pretrain.data.sequences import PackedSequences
from pretrain.data.skipped import SampleRanges, first_kept, kept_samples

if TYPE_CHECKING:  # processes that prepare a corpus start without torch
    from torch import Tensor


@dataclass(frozen=True)
class Cursor:
    """The next sample index, from which a resumed run reads on."""

    sample_index: int = 0


def micro_batches(
    cursor: Cursor,
    global_batch_size: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    counts: Sequence[int] | None = None,
) -> list[range]:
    """The sample indices of this rank's micro-batches in the step that starts at ``cursor``.

    With m = ``micro_batch_size``, micro-batch j of a step has the step's samples [j·m, (j+1)·m) for
    any number of ranks and any ``counts``. Ranks take micro-batches in turns: in turn k each rank
    with more than k micro-batches takes the next one, in rank order. With equal counts rank r takes
    the micro-batches r, r + dp_size, r + 2·dp_size, and so on. In a turn in which a rank takes none
    the rank gets an empty micro-batch: every rank must join every collective.

    Args:
        cursor: the first sample of the step.
        global_batch_size: samples of the step.
        micro_batch_size: samples of one micro-batch.
        dp_rank: this rank among those that read different samples.
        dp_size: the number of ranks that read different samples.
        counts: micro-batches of each of these ranks, which sum to those of the step; as equal as
            possible where None.
    """
    start, stop = cursor.sample_index, cursor.sample_index + global_batch_size
    starts = list(range(start, stop, micro_batch_size))
    counts = equal_division(len(starts), dp_size) if counts is None else counts
    assert (len(counts), sum(counts)) == (dp_size, len(starts)), "the step once, whoever takes it"
    mine, taken = [], 0
    for turn in range(max(counts)):
        j = taken + sum(count > turn for count in counts[:dp_rank])
        first = starts[j] if counts[dp_rank] > turn else stop
        mine.append(range(first, min(first + micro_batch_size, stop)))
        taken += sum(count > turn for count in counts)
    return mine


class Loader:
    """Gives the micro-batches of a step, and the cursor after the step.

    The loader keeps no position. ``division`` says how many micro-batches each rank takes. It may
    be replaced between steps; all ranks must then replace it by the same value.

    Args:
        sequences: of one split.
        order: the sequence of each sample index.
        batch_size: the global batch size of the step that begins at a sample index.
        micro_batch_size: sequences of one micro-batch.
        dp_rank: this rank among those that read different samples.
        dp_size: the number of ranks that read different samples.
    """

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
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.division = Division(dp_size)

    def num_micro_batches(self, cursor: Cursor) -> int:
        """The micro-batches of the step at ``cursor``, over all ranks."""
        return -(-self.batch_size(cursor.sample_index) // self.micro_batch_size)

    def samples(self, cursor: Cursor, skipped: SampleRanges = ()) -> Sequence[int]:
        """The sample indices of the step at ``cursor``, over all ranks.

        There are as many as without ``skipped``: in the place of a skipped sample comes the next
        one that is not skipped.
        """
        size = self.batch_size(first_kept(cursor.sample_index, skipped))
        return kept_samples(cursor.sample_index, size, skipped)

    def step(self, cursor: Cursor, skipped: SampleRanges = ()) -> tuple[list[Tensor], Cursor]:
        """The micro-batches of the step at ``cursor``, int64 [b, S + 1], and the next cursor."""
        samples, micro = self.samples(cursor, skipped), self.micro_batch_size
        counts = self.division.counts(-(-len(samples) // micro))
        places = micro_batches(Cursor(), len(samples), micro, self.dp_rank, self.dp_size, counts)
        batches = [self.sequences.batch([self.order[samples[i]] for i in r]) for r in places]
        return batches, Cursor(samples[-1] + 1)
