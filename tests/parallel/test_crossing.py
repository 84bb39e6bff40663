"""Groups that cross replicas: their collectives end with the epoch, whatever a rank does."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import PrefixStore, TCPStore

from parallel.comm import all_gather_rows, all_reduce
from parallel.crossing import (
    Crossing,
    RegroupError,
    check_sums,
    install_crossing,
    run_rank,
    world_group,
)
from tests.support.ranks import run_ranks

CPU, LIMIT = torch.device("cpu"), timedelta(seconds=100)


def _connect() -> TCPStore:
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=False, timeout=LIMIT)


def _regroup(crossing: Crossing, number: int, rank: int, world: int) -> None:
    crossing.begin()
    store = PrefixStore(f"epoch/{number}", _connect())
    crossing.regroup(store, rank, world, index=0, column=(rank, world))


def _goes_on_without_a_stopped_rank(rank: int) -> tuple[str, list[float], int]:
    """Rank 2 stands still, as where its link is cut: its connections stay open."""
    store, crossing = _connect(), Crossing(CPU, LIMIT)
    install_crossing(crossing)
    _regroup(crossing, 1, rank, 3)
    assert (run_rank(), world_group().size()) == (rank, 3)
    x = torch.full((4,), float(rank))
    all_reduce(x).wait()
    assert x.tolist() == [3.0] * 4
    if rank == 2:
        store.set("stands", str(os.getpid()))
        time.sleep(3600)
    stopped = int(store.get("stands"))
    if rank == 0:
        os.kill(stopped, signal.SIGSTOP)
        store.set("stopped", "")
    store.wait(["stopped"])
    threading.Timer(0.3, lambda: crossing.interrupt("rank 2 is gone")).start()
    with pytest.raises(RegroupError, match="rank 2 is gone"):
        all_reduce(torch.ones(4)).wait()
    with pytest.raises(RegroupError):
        all_reduce(torch.ones(4))  # no collective begins in an epoch that is over
    _regroup(crossing, 2, rank, 2)
    rows = all_gather_rows(torch.tensor([float(rank)]))
    if rank == 0:
        os.kill(stopped, signal.SIGKILL)
    install_crossing(None)
    return "went on", rows.flatten().tolist(), world_group().size()


def _run(rank: int) -> object:
    return _goes_on_without_a_stopped_rank(rank)


def test_the_others_go_on_without_a_rank_that_stands_still():
    from tests.support.ranks import start_ranks

    processes, results = start_ranks(_run, 3)
    found = {}
    until = time.monotonic() + 100
    while len(found) < 2 and time.monotonic() < until:
        try:
            rank, ok, value = results.get(timeout=1)
        except Exception:
            continue
        assert ok, value
        found[rank] = value
    processes[2].kill()
    assert set(found) == {0, 1}


def _an_epoch_that_is_over_makes_no_groups(rank: int) -> str:
    crossing = Crossing(CPU, LIMIT)
    install_crossing(crossing)
    threading.Timer(0.2, lambda: crossing.interrupt("rank 1 never came")).start()
    with pytest.raises(RegroupError, match="rank 1 never came"):
        _regroup(crossing, 1, 0, 2)
    install_crossing(None)
    return "ended"


def test_a_member_that_never_comes_is_not_waited_for():
    assert run_ranks(_an_epoch_that_is_over_makes_no_groups, 1) == ["ended"]


def test_the_error_of_a_sum_over_replicas_is_raised_after_the_backward():
    crossing = Crossing(CPU, LIMIT)
    install_crossing(crossing)
    try:
        check_sums()
        crossing.error = RuntimeError("connection closed")
        with pytest.raises(RuntimeError, match="connection closed"):
            check_sums()
        crossing.begin()
        check_sums()
    finally:
        install_crossing(None)
