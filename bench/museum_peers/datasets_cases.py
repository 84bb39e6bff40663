"""Streams of Hugging Face datasets: each sample once, in one order, also after a resume.

Legend: none, the streams yield numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from bench.museum_peers.frame import Answer, peer_case

WITH = ("dill==0.3.8", "multiprocess==0.70.16", "xxhash==3.5.0", "pandas==2.3.3",
        "pytz==2025.2", "httpx==0.28.1", "httpcore==1.0.9")  # fmt: skip
OLD = (*WITH, "huggingface_hub==0.36.0")


def _stream(samples: int, shards: int) -> Any:
    """The numbers from 0 to ``samples`` as a stream of ``shards`` shards."""
    from datasets import Dataset

    return Dataset.from_dict({"n": list(range(samples))}).to_iterable_dataset(num_shards=shards)


def _generated(shards: list[int]) -> Iterable[dict[str, int]]:
    """Four samples a shard."""
    for shard in shards:
        for n in range(4):
            yield {"n": 4 * shard + n}


def _numbers(stream: Iterable[dict[str, int]], count: int | None = None) -> list[int]:
    seen = []
    for sample in stream:
        seen.append(int(sample["n"]))
        if len(seen) == count:
            break
    return seen


def _interrupted(new: Callable[[], Any], counts: list[int]) -> list[int]:
    """Samples of a stream that is stopped after each of ``counts``, saved, and loaded anew."""
    seen, state = [], None
    for count in [*counts, None]:
        stream = new()
        if state is not None:
            stream.load_state_dict(state)
        seen += _numbers(stream, count)
        state = stream.state_dict()
    return seen


def _compared(seen: list[int], expected: list[int]) -> Answer:
    """Whether two streams are equal, and what is lost and repeated."""
    counts, wanted = Counter(seen), Counter(expected)
    lost, again = (wanted - counts).total(), (counts - wanted).total()
    return Answer(
        seen == expected, f"{len(seen)} samples: {lost} of {len(expected)} lost, {again} repeated"
    )


@peer_case(
    "huggingface/datasets#7656",
    went_wrong="A resume of a mapped stream skipped the rest of the shard.",
    wrong=("datasets==3.6.0", *OLD),
    fixed=("datasets==5.2.0", *WITH),
)
def a_second_resume_of_a_mapped_stream_loses_no_sample() -> Answer:
    seen = _interrupted(lambda: _stream(24, 2).map(dict), [6, 6])
    return _compared(seen, list(range(24)))


@peer_case(
    "huggingface/datasets#7901",
    went_wrong="The samples in the shuffle buffer are lost at a resume.",
    wrong=("datasets==5.2.0", *WITH),
    fixed=None,
    no_fix="The issue is open; 5.2.0 is the newest release.",
)
def a_resume_of_a_shuffled_stream_keeps_its_order() -> Answer:
    def new() -> Any:
        return _stream(80, 4).shuffle(seed=17, buffer_size=16)

    return _compared(_interrupted(new, [20]), _numbers(new()))


@peer_case(
    "huggingface/datasets#7567",
    went_wrong="Each worker of a mixed stream drew the same streams in the same order.",
    wrong=("datasets==4.3.0", *OLD),
    fixed=("datasets==4.4.2", *OLD),
)
def workers_of_a_mixed_stream_draw_different_streams() -> Answer:
    from datasets import IterableDataset, interleave_datasets
    from torch.utils.data import DataLoader, get_worker_info

    def numbered(sample: dict[str, int]) -> dict[str, int]:
        worker: Any = get_worker_info()
        return {"n": sample["n"], "worker": worker.id}

    streams = [
        IterableDataset.from_generator(
            _generated, gen_kwargs={"shards": list(range(first, first + 16))}
        )
        for first in (0, 100)
    ]
    mixed = interleave_datasets(streams, probabilities=[0.5, 0.5], seed=42).map(numbered)
    drawn: dict[int, str] = {0: "", 1: ""}
    for sample in DataLoader(mixed, batch_size=None, num_workers=2):
        drawn[int(sample["worker"])] += "AB"[int(sample["n"]) >= 400]
    first, second = drawn[0][:20], drawn[1][:20]
    return Answer(first != second, f"worker 0 drew {first}, worker 1 drew {second}")


@peer_case(
    "huggingface/datasets#7868",
    went_wrong="A mix of streams that were split by ranks gave each rank all samples.",
    wrong=("datasets==4.3.0", *OLD),
    fixed=("datasets==5.2.0", *WITH),
)
def ranks_that_mix_split_streams_read_different_samples() -> Answer:
    from datasets import interleave_datasets
    from datasets.distributed import split_dataset_by_node

    ranks = [
        _numbers(
            interleave_datasets(
                [split_dataset_by_node(_stream(24, 4), rank, 2)], probabilities=[1.0], seed=42
            )
        )
        for rank in range(2)
    ]
    both = sorted(set(ranks[0]) & set(ranks[1]))
    return Answer(not both, f"{len(both)} of 24 samples on both ranks")


@peer_case(
    "huggingface/datasets#7196",
    went_wrong="A concatenation forgot that its streams were shuffled.",
    wrong=("datasets==4.3.0", *OLD),
    fixed=("datasets==5.2.0", *WITH),
)
def a_concatenation_of_shuffled_streams_is_in_another_order_each_epoch() -> Answer:
    from datasets import concatenate_datasets

    joined = concatenate_datasets([_stream(20, 4).shuffle(seed=3, buffer_size=10)])
    epochs = []
    for epoch in range(2):
        joined.set_epoch(epoch)
        epochs.append(_numbers(joined))
    return Answer(epochs[0] != epochs[1], f"epoch 0 {epochs[0][:6]}, epoch 1 {epochs[1][:6]}")
