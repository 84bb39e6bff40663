"""Workers of one call, on OpenMP's threads and on threads of Python."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moe.experts import workers
from moe.experts.workers import run_workers


@pytest.fixture(params=["openmp", "python"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Two threads for PyTorch, with and without a parallel region of OpenMP's."""
    if request.param == "python":
        monkeypatch.setattr(workers, "_openmp_region", lambda: None)
    elif workers._openmp_region() is None:
        pytest.skip("this PyTorch has no OpenMP with GOMP_parallel")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_workers_run_side_by_side_without_gradients(threads: int) -> None:
    meet, seen = threading.Barrier(threads, timeout=60), []

    def work(worker: int) -> None:
        meet.wait()
        seen.append((worker, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    run_workers(work, threads)
    with torch.inference_mode():
        run_workers(work, threads)
    assert sorted(seen) == [(w, False, mode) for w in range(threads) for mode in (False, True)]
    assert torch.is_grad_enabled()


def test_a_failure_of_any_worker_is_the_callers_when_all_have_ended(threads: int) -> None:
    for failing in range(threads):
        ended = []

        def work(worker: int, failing: int = failing, ended: list[int] = ended) -> None:
            if worker == failing:
                raise MemoryError("no room")
            ended.append(worker)

        with pytest.raises(MemoryError, match="no room"):
            run_workers(work, threads)
        assert ended == [1 - failing]


def test_a_dispatch_mode_sees_the_operations_of_all_workers(threads: int) -> None:
    """Without _get_current_dispatch_mode, FlopCounterMode counts a part of a layer's products."""
    a = torch.ones(4, 4)
    with FlopCounterMode(display=False) as counter:
        run_workers(lambda worker: torch.mm(a, a), threads)
    assert counter.get_total_flops() == threads * 2 * 4**3


def test_more_workers_than_threads_all_run(threads: int) -> None:
    seen: list[int] = []
    run_workers(seen.append, 5, one_thread=True)
    assert sorted(seen) == list(range(5))


@pytest.mark.parametrize("one_thread", [False, True])
def test_a_thread_that_starts_meanwhile_has_the_callers_number_of_threads(
    threads: int, one_thread: bool
) -> None:
    if workers._openmp_region() is None:
        pytest.skip("threads of Python take the number of a worker")
    seen: list[int] = []

    def ask(_: int) -> None:
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()

    for workers_of_call in (1, 3, 1):
        run_workers(ask, workers_of_call, one_thread)
    assert seen == [threads] * 5


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP's entry has another name")
@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="PyTorch without OpenMP")
def test_openmps_region_is_found() -> None:
    """Without, everything works and is slower: no other test would tell."""
    assert workers._openmp_region() is not None
