"""Samples in another order, twice or never.

Losses look the same while a run reads an epoch again, or while samples are passed over.
"""

from __future__ import annotations

import numpy as np

from pretrain.data import Blend, BlendedOrder, ConcatenatedSequences, Cursor, Phase
from tests.museum.cases import Edit, case
from tests.museum.shared_data_order import Numbered, by_hand, loader_of, started, take

ORDER, LOADER = "pretrain/data/order.py", "pretrain/data/loader.py"
KEY = 'f"{self.seed}/{epoch}/{turn}/{right}"'
COUNT = 20
"""Sequences of a corpus; an epoch has five steps of four."""


@case(
    "meta-pytorch/data#1440",
    "The sampler of a stateful loader drew from a generator with a fixed seed, so that runs of "
    "different seeds shuffled alike.",
    Edit(ORDER, KEY, 'f"1/{epoch}/{turn}/{right}"'),
)
def test_runs_of_different_seeds_shuffle_differently():
    """Two runs of different seeds read one corpus in different orders."""
    orders = [take(started(COUNT, seed), Cursor(), 5)[0] for seed in (1, 2)]
    assert [sorted(order) for order in orders] == [list(range(COUNT))] * 2
    assert orders[0] != orders[1]


@case(
    "pytorch/torchtitan#2733",
    "A text data set that was read again was read in exactly the same order, so that every epoch "
    "had the batches of the first.",
    Edit(ORDER, KEY, 'f"{self.seed}/0/{turn}/{right}"'),
)
def test_each_epoch_is_in_an_order_of_its_own():
    """Three epochs of a run have every sequence once, in three different orders."""
    loader, cursor, epochs = started(COUNT), Cursor(), []
    for _ in range(3):
        epoch, cursor = take(loader, cursor, 5)
        assert sorted(epoch) == list(range(COUNT))
        epochs.append(tuple(epoch))
    assert len(set(epochs)) == 3


@case(
    "huggingface/datasets#7196",
    "A concatenation of shuffled streams forgot that the streams were shuffled, and a new epoch "
    "changed nothing.",
    Edit(ORDER, "self.orders[name].many(numbers)", "numbers % self.orders[name].num_sequences"),
)
def test_joined_sources_stay_shuffled_in_every_epoch():
    """Each of two joined sources is read in a shuffled order, which changes from epoch to epoch."""
    sequences = ConcatenatedSequences([Numbered(COUNT), Numbered(COUNT, first=COUNT)])
    blend = Blend((Phase.of(0, {"a": 1, "b": 1}),))
    loader = loader_of(sequences, BlendedOrder(blend, {"a": COUNT, "b": COUNT}, 3))
    for source in (range(COUNT), range(COUNT, 2 * COUNT)):
        epochs = []
        for first in (0, 2 * COUNT):
            taken, _ = take(loader, Cursor(first), 10)
            epochs.append([number for number in taken if number in source])
        assert sorted(epochs[0]) == sorted(epochs[1]) == list(source)
        assert epochs[0] != list(source), "the source is in the order of its files"
        assert epochs[0] != epochs[1], "two epochs have one order"


@case(
    "NVIDIA/Megatron-LM#697",
    "Documents were shuffled over all epochs of a run together, so that some came again before "
    "others had come once.",
    Edit(
        ORDER, "assert num_sequences >= 1", "assert num_sequences >= 1\n        num_sequences *= 4"
    ),
    Edit(ORDER, "return values", "return values % (self.num_sequences // 4)"),
)
def test_no_sequence_comes_again_before_all_have_come():
    """Every epoch of a run has each sequence exactly once before the next epoch begins."""
    taken, _ = take(started(COUNT), Cursor(), 20)
    for epoch in np.split(np.array(taken), 4):
        assert sorted(epoch.tolist()) == list(range(COUNT))


@case(
    "meta-pytorch/data#1437",
    "A loader whose state was saved at the end of an epoch came back with another state, and the "
    "epoch that followed was dropped.",
    Edit(
        LOADER,
        "return kept_samples(cursor.sample_index, size, skipped)",
        "dropped = len(self.sequences) * (cursor.sample_index == len(self.sequences))\n"
        "        return kept_samples(cursor.sample_index + dropped, size, skipped)",
    ),
)
def test_a_resume_at_the_end_of_an_epoch_has_the_next_epoch():
    """A run that resumes at the end of an epoch reads the whole epoch that follows."""
    _, cursor = take(started(COUNT), Cursor(), 5)
    following, _ = take(started(COUNT), cursor, 5)
    assert following == by_hand(COUNT, range(COUNT, 2 * COUNT))


@case(
    "Lightning-AI/pytorch-lightning#850",
    "A run that was resumed from a checkpoint of an epoch's end trained on that epoch once more.",
    Edit(
        LOADER,
        "return batches, Cursor(samples[-1] + 1)",
        "ended = (samples[-1] + 1) % len(self.sequences) == 0\n"
        "        return batches, Cursor(samples[-1] + 1 - ended * len(self.sequences))",
    ),
)
def test_a_resume_at_the_end_of_an_epoch_does_not_repeat_the_epoch():
    """A run that resumes at the end of an epoch goes on with an order that it has not had."""
    ended, cursor = take(started(COUNT), Cursor(), 5)
    following, _ = take(started(COUNT), cursor, 5)
    assert sorted(ended) == sorted(following)
    assert ended != following, "the epoch was read again"


@case(
    "huggingface/accelerate#4012",
    "The counter of epochs was in no checkpoint, so that a resumed run shuffled as the first "
    "epoch was shuffled.",
    Edit(
        LOADER,
        "indices = self._blocks.many(samples)",
        "size = len(self.sequences)\n"
        "        self._begun = getattr(self, '_begun', samples[0] // size)\n"
        "        indices = self.order.many(np.array(samples) - self._begun * size)",
    ),
)
def test_a_resumed_run_has_the_orders_of_the_unbroken_run():
    """A run that resumes after its first epoch has the order that an unbroken run has then."""
    unbroken = started(COUNT)
    _, cursor = take(unbroken, Cursor(), 5)
    expected, _ = take(unbroken, cursor, 5)
    resumed, _ = take(started(COUNT), cursor, 5)
    assert resumed == expected


@case(
    "huggingface/accelerate#4195",
    "A stateful loader on several ranks restored its place and not the permutation, so that it "
    "passed over batches of another order than the one it had read.",
    Edit(ORDER, KEY, 'f"{id(self)}/{epoch}/{turn}/{right}"'),
)
def test_two_ranks_resume_in_the_second_epoch_with_its_order():
    """Two ranks that resume within the second epoch read what two unbroken ranks read there."""
    unbroken = [started(COUNT, rank=rank, ranks=2) for rank in range(2)]
    cursors = [take(loader, Cursor(), 7)[1] for loader in unbroken]
    assert cursors == [Cursor(28)] * 2
    expected = [take(loader, Cursor(28), 3)[0] for loader in unbroken]
    new = [started(COUNT, rank=rank, ranks=2) for rank in range(2)]
    assert [take(loader, Cursor(28), 3)[0] for loader in new] == expected


@case(
    "Lightning-AI/litData#760",
    "Epochs that end early were to go on in the data, and from the third on they read the second "
    "one's samples again.",
    Edit(
        LOADER,
        "return batches, after",
        "return batches, after if found is None else cursor",
    ),
)
def test_goes_of_a_few_steps_go_on_in_the_data():
    """Four goes of two steps read eight steps of data, and no sample of them twice."""
    count, cursor, seen = 40, Cursor(), []
    loader = started(count)
    for _ in range(4):
        taken, cursor = take(loader, cursor, 2)
        seen += taken
    assert len(set(seen)) == 32


@case(
    "huggingface/datasets#7656",
    "A mapped stream did not pass its place on to a checkpoint, so that a resume left out many "
    "samples.",
    Edit(
        LOADER,
        "return batches, after",
        "return batches, Cursor(2 * after.sample_index - cursor.sample_index)",
    ),
)
def test_resumes_leave_out_no_sample_that_was_read_ahead():
    """A run that is started three times within an epoch reads each sequence of the epoch once."""
    cursor, seen = Cursor(), []
    for steps in (1, 2, 2):
        taken, cursor = take(started(COUNT), cursor, steps)
        seen += taken
    assert sorted(seen) == list(range(COUNT))


@case(
    "huggingface/datasets#7901",
    "A resume of a shuffled stream lost the samples that were in its shuffle buffer.",
    Edit(
        ORDER,
        "parts = []",
        "parts = []\n"
        "        if not self._blocks and samples[0]:\n"
        "            samples = range(samples[0] + 8, samples[-1] + 9)",
    ),
)
def test_a_resume_of_a_shuffled_corpus_loses_nothing():
    """A run that resumes within a shuffled epoch reads the rest of the epoch, in its order."""
    begun, cursor = take(started(80), Cursor(), 5)
    rest, _ = take(started(80), cursor, 15)
    assert begun + rest == by_hand(80, range(80))
