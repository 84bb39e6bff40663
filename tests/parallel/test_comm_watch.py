"""Traffic is counted as it was: whole and exposed seconds, bytes, and what it was for."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import parallel
from parallel import (
    Kind,
    ParallelDims,
    Topology,
    Traffic,
    all_to_all,
    apply_fsdp,
    by_parallelism,
    comm_watch,
    start_all_to_all,
    watch_collectives,
)
from parallel.comm_watch import Watch
from tests.support.ranks import run_ranks

EP = Kind("all_to_all", "ep")


class Clock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Work:
    """It takes as long as the clock is told."""

    def __init__(self, clock: Clock, seconds: float, has_future: bool):
        self.clock, self.end, self.has_future = clock, clock.now + seconds, has_future
        self.callbacks = []

    def get_future(self):
        if not self.has_future:
            raise RuntimeError("Work::getFuture not implemented.")
        return self

    def add_done_callback(self, callback):
        self.callbacks.append(callback)

    def pass_time(self, seconds: float) -> None:
        until = self.clock.now + seconds
        if self.clock.now < self.end <= until:
            self.clock.now = self.end
            for callback in self.callbacks:
                callback(self)
        self.clock.now = until

    def wait(self):
        self.pass_time(max(self.end - self.clock.now, 0.0))


def seconds_of(monkeypatch, op: str, takes: float, computes: float, has_future=True) -> Traffic:
    clock = Clock()
    monkeypatch.setattr(comm_watch, "time", clock)

    class Two:
        group_name = "ranks"

        def size(self):
            return 2

    with watch_collectives() as watch:
        work = Work(clock, takes, has_future)
        flight = parallel.watched(Kind(op, "ep"), torch.zeros(3), Two(), lambda: work)
        work.pass_time(computes)
        flight.wait()
    return watch.take()[Kind(op, "ep")]


def test_what_is_computed_meanwhile_hides_it(monkeypatch):
    assert seconds_of(monkeypatch, "all_to_all", 5.0, 0.0) == Traffic(1, 12, 5.0, 5.0)
    assert seconds_of(monkeypatch, "all_to_all", 5.0, 2.0) == Traffic(1, 12, 5.0, 3.0)
    assert seconds_of(monkeypatch, "all_to_all", 5.0, 9.0) == Traffic(1, 12, 5.0, 0.0)
    # Where a backend does not tell the end, it is when it was waited for.
    assert seconds_of(monkeypatch, "all_to_all", 5.0, 9.0, False) == Traffic(1, 12, 9.0, 0.0)
    # A receive is begun long before somebody sends.
    assert seconds_of(monkeypatch, "recv", 5.0, 2.0, False) == Traffic(1, 12, 3.0, 3.0)


def wait_long(watch: Watch, waited: Path) -> None:
    """Let the other rank come when this one has waited for it for 0.3 s."""
    while not watch.waiting:
        time.sleep(0.001)
    time.sleep(0.3)
    waited.touch()


def a_rank_that_waits(rank: int, waited: Path) -> tuple[Traffic, Traffic, dict, str, dict]:
    group = dist.group.WORLD
    x = torch.ones(4, 2, requires_grad=True)
    all_to_all(x, None, None, group)  # nobody watches
    with watch_collectives() as watch:
        dist.barrier()
        if rank == 0:
            threading.Thread(target=wait_long, args=(watch, waited)).start()
        while rank == 1 and not waited.exists():
            time.sleep(0.001)
        all_to_all(x, None, None, group).sum().backward()
        late = watch.take()[EP]
        dist.barrier()
        arriving = start_all_to_all(x, None, None, group)
        time.sleep(0.3)
        arriving.wait()
        hidden = watch.take()[EP]
        words = watch.describe()
        model = nn.Sequential(nn.Linear(4, 4))
        apply_fsdp(model, ParallelDims.build(Topology(dp_shard=2), "cpu"), [model[0]])
        model(torch.ones(1, 4)).sum().backward()
        return late, hidden, watch.take(), words, watch.take()


def test_ranks_that_wait_for_another_say_so(tmp_path):
    first, second = run_ranks(a_rank_that_waits, 2, tmp_path / "waited")
    waited, hidden, fsdp, words, nothing = first
    # There and back: 32 bytes each.
    assert (waited.count, waited.bytes) == (2, 64)
    assert waited.exposed_seconds >= 0.3
    assert waited.exposed_seconds <= waited.seconds
    assert (hidden.count, hidden.bytes) == (1, 32)
    assert hidden.exposed_seconds < hidden.seconds
    assert words == "all_to_all of ep, number 3 among ranks 0, 1"
    assert set(fsdp) == {Kind("all_gather", "dp"), Kind("reduce_scatter", "dp")}
    # 20 numbers of 4 bytes, of which a rank has half.
    assert fsdp[Kind("all_gather", "dp")].bytes == 40 * fsdp[Kind("all_gather", "dp")].count
    assert fsdp[Kind("reduce_scatter", "dp")].bytes == 80
    assert nothing == {}
    assert second[0].count == 2


def test_what_they_are_for_adds_up():
    traffic = {
        Kind("all_gather", "dp"): Traffic(2, 10, 3.0, 1.0),
        Kind("reduce_scatter", "dp"): Traffic(1, 5, 2.0, 2.0),
        EP: Traffic(1, 7, 1.0, 0.0),
    }
    sums = by_parallelism(traffic)
    assert sums["dp"] == Traffic(3, 15, 5.0, 3.0)
    assert sums["ep"] == Traffic(1, 7, 1.0, 0.0)
    assert sums["tp"] == Traffic()
