"""The stateful loader of torchdata: a resume is the run that it resumes.

Legend: none, the loaders yield numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from bench.museum_peers.frame import Answer, peer_case


def _loader() -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(list(range(12)), batch_size=1, shuffle=True)


@peer_case(
    "meta-pytorch/data#1437",
    went_wrong="After a resume at the end of an epoch, the next epoch had no samples.",
    wrong=("torchdata==0.10.1",),
    fixed=("torchdata==0.11.0",),
)
def a_resume_at_the_end_of_an_epoch_begins_the_next() -> Answer:
    torch.manual_seed(1)
    loader = _loader()
    for _ in range(2):
        list(loader)
    resumed = _loader()
    resumed.load_state_dict(loader.state_dict())
    count = len(list(resumed))
    return Answer(count == 12, f"{count} of 12 samples in the epoch after the resume")


@peer_case(
    "meta-pytorch/data#1440",
    went_wrong="Loaders under different seeds shuffled alike.",
    wrong=("torchdata==0.10.1",),
    fixed=("torchdata==0.11.0",),
)
def loaders_of_different_seeds_shuffle_differently() -> Answer:
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        orders.append([int(sample) for sample in _loader()])
    return Answer(orders[0] != orders[1], f"seed 1 {orders[0][:6]}, seed 2 {orders[1][:6]}")
