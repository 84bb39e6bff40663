"""Loaders of Accelerate: each sample once, and in its epoch's order after a resume.

Legend: none, the loaders yield numbers.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.museum_peers.frame import Answer, peer_case, run_gloo

NEWEST = "1.15.0 is the newest release."


def _accelerator(**options: Any) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration

    return Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))


def _prepared(accelerator: Any, samples: int, batch_size: int, shuffle: bool = True) -> Any:
    torch.manual_seed(11)
    numbers: Any = range(samples)
    return accelerator.prepare(DataLoader(numbers, batch_size=batch_size, shuffle=shuffle))


def _numbers(loader: Any, count: int | None = None) -> list[int]:
    seen: list[int] = []
    for number, batch in enumerate(loader, 1):
        seen += batch.tolist()
        if number == count:
            break
    return seen


@peer_case(
    "huggingface/accelerate#4012",
    went_wrong="A resume after an epoch shuffled the next epoch like the first.",
    wrong=("accelerate==1.15.0",),
    fixed=None,
    no_fix=f"The pull request with the fix is open; {NEWEST}",
)
def a_resume_between_epochs_goes_on_to_the_next_order() -> Answer:
    first = _accelerator(use_seedable_sampler=True)
    loader = _prepared(first, 12, 1)
    with tempfile.TemporaryDirectory() as folder:
        zero = _numbers(loader)
        first.save_state(folder)
        one = _numbers(loader)
        second = _accelerator(use_seedable_sampler=True)
        resumed = _prepared(second, 12, 1)
        second.load_state(folder)
        seen = _numbers(resumed)
    again = "epoch 0's order again" if seen == zero else f"order {seen}"
    return Answer(seen == one, f"{again} instead of {one}" if seen != one else f"order {seen}")


def _stateful(rank: int) -> dict[str, list[int]]:
    accelerator = _accelerator(use_seedable_sampler=True, use_stateful_dataloader=True)
    loader = _prepared(accelerator, 32, 2)
    zero = _numbers(loader)
    head: list[int] = []
    rest: list[int] = []
    state = None
    for number, batch in enumerate(loader, 1):
        (head if number <= 3 else rest).extend(batch.tolist())
        if number == 3:
            state = loader.state_dict()
    resumed = _prepared(accelerator, 32, 2)
    resumed.load_state_dict(state)
    return {"zero": zero, "rest": rest, "seen": _numbers(resumed)}


@peer_case(
    "huggingface/accelerate#4195",
    went_wrong="A resume on two ranks had the place in the data, and the first epoch's order.",
    wrong=("accelerate==1.15.0", "torchdata==0.11.0"),
    fixed=None,
    no_fix=f"The issue is open; {NEWEST}",
)
def a_resume_in_the_second_epoch_on_two_ranks_keeps_its_order() -> Answer:
    answer = run_gloo(_stateful, 2)[0]
    seen, rest = answer["seen"], answer["rest"]
    kind = " (the first epoch's)" if seen == answer["zero"][-len(seen) :] else ""
    return Answer(seen == rest, f"rank 0 got {seen[:6]}{kind} instead of {rest[:6]}")


def _gathered(rank: int) -> list[list[int]]:
    from accelerate import skip_first_batches

    accelerator = _accelerator()
    loader = _prepared(accelerator, 10, 2, shuffle=False)
    counts = []
    for each_epoch in (loader, skip_first_batches(loader, 0)):
        seen: list[int] = []
        for batch in each_epoch:
            seen += accelerator.gather_for_metrics(batch).tolist()
        counts.append(seen)
    return counts


@peer_case(
    "huggingface/accelerate#4235",
    went_wrong="After skip_first_batches the samples that fill the last batch counted in metrics.",
    wrong=("accelerate==1.15.0",),
    fixed=None,
    no_fix=f"The pull request with the fix is open; {NEWEST}",
)
def a_metric_of_ten_samples_has_ten_samples() -> Answer:
    plain, skipped = run_gloo(_gathered, 2)[0]
    return Answer(
        len(skipped) == 10, f"{len(plain)} samples without a skip, {len(skipped)} with a skip of 0"
    )
