"""The micro-batches of a step: packed sequences in a global order that no rank count changes.

    text files -> documents -> tokens in shard files -> sequences -> global order -> micro-batches

Legend: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from pretrain.data.blend import Blend
from pretrain.data.division import Division, equal_division
from pretrain.data.order import BlendedOrder, GlobalOrder, OrderInBlocks
from pretrain.data.sequences import Sequences, read_batch
from pretrain.data.skipped import SampleRanges, first_kept, kept_samples

if TYPE_CHECKING:  # processes that prepare a corpus start without torch
    from torch import Tensor


@dataclass(frozen=True)
class Cursor:
    """The next sample index, from which a resumed run reads on."""

    sample_index: int = 0


Step = tuple[list["Tensor"], Cursor]
"""The micro-batches of a step, and the cursor after it."""


class _ReadAhead:
    """One step that a thread reads before it is asked for."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._begun: tuple[Hashable, Future[Step]] | None = None

    def begin(self, key: Hashable, read: Callable[[], Step]) -> None:
        """Let the thread read."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "read-ahead")
        self._begun = key, self._pool.submit(read)

    def take(self, key: Hashable) -> Step | None:
        """What was read for a key; None where it was read for another one. Either way the thread
        reads no more: sequences and orders are for one thread at a time."""
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        error = begun[1].exception()
        if begun[0] != key:
            return None
        if error is not None:
            raise error
        return begun[1].result()


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
    the rank gets an empty micro-batch, to join the turn's collectives.

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
        pin_memory: give batches that a GPU can copy while it computes.
        read_ahead: let another thread read the next step.

    Attributes:
        blend: the blend of the run that ``order`` draws.
    """

    def __init__(
        self,
        sequences: Sequences,
        order: GlobalOrder | BlendedOrder,
        batch_size: Callable[[int], int],
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        pin_memory: bool = False,
        read_ahead: bool = True,
    ) -> None:
        self.blend: Blend | None = None
        self._pin_memory, self._ahead = pin_memory, _ReadAhead() if read_ahead else None
        self._blocks = OrderInBlocks(order)
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
        """The micro-batches of the step at ``cursor``, int64 [b, S + 1], and the next cursor.

        There are as many on each rank, some of them empty, where ``division`` is in lockstep;
        otherwise each rank has its own, and at least one, which may be empty.

        Another thread then reads the step at the next cursor. Where the next call asks for
        something else, as after a step that was skipped, that is read then.
        """
        skipped = tuple(skipped)
        if self._ahead is None:
            return self._read(cursor, skipped)
        found = self._ahead.take(self._key(cursor, skipped))
        batches, after = self._read(cursor, skipped) if found is None else found
        self._ahead.begin(self._key(after, skipped), lambda: self._read(after, skipped))
        return batches, after

    def _key(self, cursor: Cursor, skipped: SampleRanges) -> Hashable:
        """All that the batches of a step depend on."""
        size = self.batch_size(cursor.sample_index)
        return (cursor, skipped, size, self.division, self.dp_rank, self.dp_size, id(self.order))

    def _read(self, cursor: Cursor, skipped: SampleRanges) -> Step:
        samples, micro = self.samples(cursor, skipped), self.micro_batch_size
        counts = self.division.counts(-(-len(samples) // micro))
        places = micro_batches(Cursor(), len(samples), micro, self.dp_rank, self.dp_size, counts)
        if not self.division.lockstep:  # no rank waits for this rank within the step
            places = [each for each in places if each] or places[:1]
        if self._blocks.order is not self.order:
            self._blocks = OrderInBlocks(self.order)
        indices = self._blocks.many(samples)
        # One read of all rows; micro-batches are parts of it.
        mine = [indices[r.start : r.stop] for r in places]
        rows = read_batch(self.sequences, np.concatenate(mine))
        batches = list(rows.split([len(r) for r in places]))
        if self._pin_memory:
            batches = [batch.pin_memory() for batch in batches]
        return batches, Cursor(samples[-1] + 1)
