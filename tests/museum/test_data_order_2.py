"""Samples in another order, twice or never.

Here: ranks that share a step, layouts that change, and runs that are started again.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from parallel import Topology
from pretrain.data import Blend, BlendedOrder, ConcatenatedSequences, Cursor, Phase
from tests.museum.cases import Edit, case
from tests.museum.shared_data_order import Numbered, by_hand, loader_of, numbers_of, started, take
from tests.museum.shared_three_starts import BATCH, three_starts

LOADER, RESUME = "pretrain/data/loader.py", "pretrain/checkpoint/resume.py"
CONTINUED = "progress = job.continue_step_counts(progress)"


@case(
    "huggingface/datasets#7868",
    "Ranks that mixed streams which had been split between them read the same samples.",
    Edit(LOADER, "j = taken + sum(count > turn for count in counts[:dp_rank])", "j = taken"),
)
def test_ranks_read_different_samples_of_mixed_sources():
    """Four ranks that mix two sources share the samples of a step: each sample has one rank."""
    sequences = ConcatenatedSequences([Numbered(20), Numbered(20, first=20)])
    blend = Blend((Phase.of(0, {"a": 1, "b": 1}),))
    order = BlendedOrder(blend, {"a": 20, "b": 20}, 3)
    together: list[int] = []
    for rank in range(4):
        together += take(loader_of(sequences, order, rank=rank, ranks=4), Cursor(), 10)[0]
    assert sorted(together) == list(range(40))


@case(
    "huggingface/datasets#7567",
    "The workers of a mixed stream had one random state, and all of them drew the sources in the "
    "same turns.",
    Edit(
        LOADER,
        "[indices[r.start : r.stop] for r in places]",
        "[indices[: len(r)] for r in places]",
    ),
)
def test_readers_of_a_blend_together_have_its_weights():
    """A step that four ranks read has the sources of a blend as often as their weights say."""
    sequences = ConcatenatedSequences([Numbered(40), Numbered(40, first=40)])
    order = BlendedOrder(Blend((Phase.of(0, {"a": 3, "b": 1}),)), {"a": 40, "b": 40}, 3)
    ranks = [loader_of(sequences, order, batch=8, rank=rank, ranks=4) for rank in range(4)]
    for first in (0, 8, 16):
        step = [n for loader in ranks for n in numbers_of(loader.step(Cursor(first))[0])]
        assert Counter("ab"[number // 40] for number in step) == {"a": 6, "b": 2}


def _read_in(topology: Topology, steps: int) -> list[int]:
    """The sequences of some steps in a layout, in the order of their micro-batches."""
    size = topology.dp_replicate * topology.dp_shard
    loaders = {
        topology.dp_rank(rank): started(40, batch=8, rank=topology.dp_rank(rank), ranks=size)
        for rank in range(topology.world)
    }
    found: list[int] = []
    for step in range(steps):
        read = [loaders[index].step(Cursor(8 * step))[0] for index in range(size)]
        for turn in zip(*read, strict=True):
            found += numbers_of(turn)
    return found


@case(
    "mosaicml/streaming#725",
    "Samples came in another order where several devices read the same samples.",
    Edit(
        LOADER,
        "self.sequences, self.order = sequences, order",
        "self.sequences = sequences\n"
        "        self.order = GlobalOrder(order.num_sequences, order.seed + dp_size)",
    ),
)
def test_ranks_that_read_the_same_samples_change_no_order():
    """Four ranks read one order of samples, whether or not two of them read the same samples."""
    apart = _read_in(Topology(dp_shard=4), 4)
    in_pairs = _read_in(Topology(dp_shard=2, tp=2), 4)
    assert apart == in_pairs == by_hand(40, range(32))


@case(
    "pytorch/torchtitan#816",
    "A checkpoint had a place in the data for each data-parallel rank, and a run that resumed on "
    "fewer ranks dropped the places of the ranks that were gone.",
    Edit(
        LOADER,
        "return kept_samples(cursor.sample_index, size, skipped)",
        "return kept_samples(cursor.sample_index * self.dp_size, size, skipped)",
    ),
    Edit(LOADER, "Cursor(samples[-1] + 1)", "Cursor((samples[-1] + 1) // self.dp_size)"),
)
def test_a_resume_on_fewer_ranks_goes_on_in_the_data():
    """A run of four ranks that resumes on two reads each sample of the epoch once, as one rank."""
    taken, cursor = [], Cursor()
    for ranks, steps in ((4, 3), (2, 2)):
        loaders = [started(40, batch=8, rank=rank, ranks=ranks) for rank in range(ranks)]
        for _ in range(steps):
            read = [loader.step(cursor) for loader in loaders]
            taken += [n for batches, _ in read for n in numbers_of(batches)]
            assert len({after for _, after in read}) == 1
            cursor = read[0][1]
    assert sorted(taken) == sorted(by_hand(40, range(40)))


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    return three_starts(tmp_path_factory.mktemp("starts"))


@case(
    "pytorch/torchtitan#3907",
    "After a resume the place of the data stood still at zero in every checkpoint, so that the "
    "second resume of a run began the data from the start.",
    Edit(RESUME, CONTINUED, f"{CONTINUED}\n    progress = replace(progress, first_sample=-1)"),
    Edit(
        "pretrain/checkpoint/contents.py",
        "progress=progress,",
        "progress=progress if progress.first_sample >= 0\n"
        "            else __import__('dataclasses').replace(progress, consumed_samples=0),",
    ),
)
def test_a_second_resume_goes_on_in_the_data(starts):
    """A run that is resumed a second time trains on the samples that follow."""
    _, taken, expected = starts
    assert np.array_equal(taken[2], expected[2]), "other samples than those that follow"


@case(
    "Lightning-AI/pytorch-lightning#20775",
    "A resumed run began to read its data twice, and what the first of these reads had taken was "
    "trained on by nobody.",
    Edit(
        RESUME,
        CONTINUED,
        f"{CONTINUED}\n    twice = progress.consumed_samples\n"
        "    twice += job.loader.batch_size(twice)\n"
        "    progress = replace(progress, consumed_samples=twice)",
    ),
)
def test_a_resumed_run_trains_on_the_very_next_samples(starts):
    """The first step after a resume trains on the samples after those of the last step before."""
    _, taken, expected = starts
    assert np.array_equal(taken[1][:BATCH], expected[1][:BATCH]), "samples were passed over"


@case(
    "huggingface/transformers#40691",
    "A resume within the second epoch or a later one went on in the first epoch's order.",
    Edit(
        RESUME,
        CONTINUED,
        f"{CONTINUED}\n    within = progress.consumed_samples % len(job.loader.sequences)\n"
        "    progress = replace(progress, consumed_samples=within)",
    ),
)
def test_a_resume_in_the_second_epoch_keeps_its_order(starts):
    """A run that resumes within its second epoch trains on the rest of that epoch, in order."""
    count, taken, expected = starts
    assert sum(map(len, taken[:2])) > count, "the resume is in the second epoch"
    assert np.array_equal(taken[2], expected[2]), "other samples than those that follow"
