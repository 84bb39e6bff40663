"""How a process becomes a rank of a run."""

from __future__ import annotations

import os

import pytest

from pretrain.runtime.ranks import start, times_cuda
from tests.support.ranks import run_ranks

TIME_CUDA = "CONVOY_TIME_CUDA_COLLECTIVES"


@pytest.mark.parametrize(
    ("environment", "timed"),
    [({}, True), ({TIME_CUDA: "1"}, True), ({TIME_CUDA: ""}, True), ({TIME_CUDA: "0"}, False)],
)
def test_collectives_on_cuda_are_timed_unless_the_environment_turns_that_off(environment, timed):
    assert times_cuda(environment) is timed


def monitor_on_rank(rank: int) -> list[bool]:
    timed = []
    os.environ.pop(TIME_CUDA, None)
    for _ in range(2):
        runtime = start(60.0)
        timed.append(runtime.comm_monitor.time_cuda)
        runtime.close()
        os.environ[TIME_CUDA] = "0"
    return timed


def test_a_rank_times_collectives_as_the_environment_says():
    assert run_ranks(monitor_on_rank, 1, group=False) == [[True, False]]
