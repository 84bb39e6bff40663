"""The comm monitor: seconds, exposed seconds, bytes and purpose of collectives."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from parallel import (
    CollectiveKind,
    CommStats,
    ParallelDims,
    Topology,
    apply_fsdp,
    by_parallelism,
    monitor_collectives,
)
from parallel.comm import comm_watch
from parallel.comm.collectives import start_all_to_all
from parallel.comm.comm_watch import CommMonitor
from tests.support.ranks import run_ranks

EP = CollectiveKind("all_to_all", "ep")


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


def seconds_of(monkeypatch, op: str, takes: float, computes: float, has_future=True) -> CommStats:
    clock = Clock()
    monkeypatch.setattr(comm_watch, "time", clock)

    class Two:
        group_name = "ranks"

        def size(self):
            return 2

    with monitor_collectives() as monitor:
        work = Work(clock, takes, has_future)
        kind = CollectiveKind(op, "ep")
        monitored = comm_watch.monitored(kind, torch.zeros(3), Two(), lambda: work)
        work.pass_time(computes)
        monitored.wait()
    return monitor.take()[kind]


def test_what_is_computed_meanwhile_hides_it(monkeypatch):
    assert seconds_of(monkeypatch, "all_to_all", 5.0, 0.0) == CommStats(1, 12, 5.0, 5.0)
    assert seconds_of(monkeypatch, "all_to_all", 5.0, 2.0) == CommStats(1, 12, 5.0, 3.0)
    assert seconds_of(monkeypatch, "all_to_all", 5.0, 9.0) == CommStats(1, 12, 5.0, 0.0)
    # Where a backend does not tell the end, it is when it was waited for.
    assert seconds_of(monkeypatch, "all_to_all", 5.0, 9.0, False) == CommStats(1, 12, 9.0, 0.0)
    # A receive is begun long before somebody sends.
    assert seconds_of(monkeypatch, "recv", 5.0, 2.0, False) == CommStats(1, 12, 3.0, 3.0)


def test_exposed_seconds_are_those_since_the_last_take():
    monitor = CommMonitor()
    monitor.add(EP, CommStats(1, 8, 2.0, 0.5))
    monitor.add(CollectiveKind("all_gather", "dp"), CommStats(1, 8, 1.0, 0.25))
    assert [monitor.exposed_seconds, monitor.exposed_seconds] == [0.75, 0.75]
    monitor.take()
    assert monitor.exposed_seconds == 0.0


def wait_long(monitor: CommMonitor, waited: Path) -> None:
    """Let the other rank come when this one has waited for it for 0.3 s."""
    while not monitor.waiting:
        time.sleep(0.001)
    time.sleep(0.3)
    waited.touch()


def a_rank_that_waits(rank: int, waited: Path) -> tuple[CommStats, CommStats, dict, str, dict]:
    group = dist.group.WORLD
    x = torch.ones(4, 2, requires_grad=True)
    start_all_to_all(x, None, None, group).wait()  # without a monitor
    with monitor_collectives() as monitor:
        dist.barrier()
        if rank == 0:
            threading.Thread(target=wait_long, args=(monitor, waited)).start()
        while rank == 1 and not waited.exists():
            time.sleep(0.001)
        start_all_to_all(x, None, None, group).wait().sum().backward()
        late = monitor.take()[EP]
        dist.barrier()
        pending = start_all_to_all(x, None, None, group)
        time.sleep(0.3)
        pending.wait()
        hidden = monitor.take()[EP]
        words = monitor.describe()
        model = nn.Sequential(nn.Linear(4, 4))
        apply_fsdp(model, ParallelDims.build(Topology(dp_shard=2), "cpu"), blocks=[model[0]])
        monitor.take()  # what compared the initial weights
        model(torch.ones(1, 4)).sum().backward()
        return late, hidden, monitor.take(), words, monitor.take()


def test_ranks_that_wait_for_another_say_so(tmp_path):
    first, second = run_ranks(a_rank_that_waits, 2, tmp_path / "waited")
    waited, hidden, fsdp, words, nothing = first
    # There and back: 32 bytes each.
    assert (waited.count, waited.bytes) == (2, 64)
    assert waited.exposed_seconds >= 0.3
    assert waited.exposed_seconds <= waited.seconds
    assert (hidden.count, hidden.bytes) == (1, 32)
    assert hidden.exposed_seconds < hidden.seconds
    assert words == "all_to_all of ep, number 3 among ranks 0-1"
    gather, reduce = CollectiveKind("all_gather", "dp"), CollectiveKind("reduce_scatter", "dp")
    assert set(fsdp) == {gather, reduce}
    # 20 numbers of 4 bytes, of which a rank has half.
    assert fsdp[gather].bytes == 40 * fsdp[gather].count
    assert fsdp[reduce].bytes == 80
    assert nothing == {}
    assert second[0].count == 2


def test_what_they_are_for_adds_up():
    stats = {
        CollectiveKind("all_gather", "dp"): CommStats(2, 10, 3.0, 1.0),
        CollectiveKind("reduce_scatter", "dp"): CommStats(1, 5, 2.0, 2.0),
        EP: CommStats(1, 7, 1.0, 0.0),
    }
    sums = by_parallelism(stats)
    assert sums["dp"] == CommStats(3, 15, 5.0, 3.0)
    assert sums["ep"] == CommStats(1, 7, 1.0, 0.0)
    assert sums["tp"] == CommStats()


class OnCuda:
    is_cuda = True

    def numel(self):
        return 3

    def element_size(self):
        return 4


class Two:
    group_name = "ranks"

    def size(self):
        return 2


class Stream:
    """A device's stream: where its queue is in time, in seconds."""

    def __init__(self) -> None:
        self.time = 0.0


class Device:
    """Streams and events of one device, as torch.cuda has them. The host is ahead of the device:
    it has passed no event until the host waits for one."""

    def __init__(self, monkeypatch) -> None:
        self.compute, self.waits = Stream(), 0
        self.current = self.compute
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at: float | None = None

            def record(self) -> None:
                self.at = device.current.time

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                device.waits += 1

            def elapsed_time(self, other) -> float:
                return 1e3 * (other.at - self.at)

        @contextmanager
        def stream(entered: Stream):
            before, device.current = device.current, entered
            yield
            device.current = before

        monkeypatch.setattr(comm_watch._CudaTimedWork, "_end_stream", None)
        for name, value in {
            "Event": Event, "Stream": Stream, "stream": stream,
            "current_stream": lambda: device.current, "default_stream": lambda: device.compute,
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)

    def collective(self, seconds: float):
        """A work that ends so many seconds after now; ``wait`` holds up the current stream."""
        device, end = self, self.current.time + seconds

        class CudaWork:
            def wait(self) -> None:
                device.current.time = max(device.current.time, end)

        return CudaWork()


def test_cuda_collectives_are_timed_by_events_and_the_host_does_not_wait_before_the_end(
    monkeypatch,
):
    device = Device(monkeypatch)
    with monitor_collectives() as monitor:
        # The compute stream works for 2 of the 3 seconds, and waits for the last one.
        half_hidden = comm_watch.monitored(EP, OnCuda(), Two(), lambda: device.collective(3.0))
        device.compute.time += 2.0
        half_hidden.wait()
        # A collective that ends before the compute stream comes to its wait is hidden.
        hidden = comm_watch.monitored(EP, OnCuda(), Two(), lambda: device.collective(1.0))
        device.compute.time += 5.0
        hidden.wait()
        assert not device.waits
    assert monitor.take() == {EP: CommStats(2, 24, 3.0 + 1.0, 1.0)}
    assert device.waits


def test_cuda_collectives_are_counted_and_not_timed_where_that_is_turned_off(monkeypatch):
    def no_event(*args, **kwargs):
        raise RuntimeError("an event")

    monkeypatch.setattr(torch.cuda, "Event", no_event)
    work = Work(Clock(), 1.0, True)
    with monitor_collectives(time_cuda=False) as monitor:
        assert comm_watch.monitored(EP, OnCuda(), Two(), lambda: work) is work
    assert monitor.take() == {EP: CommStats(1, 12, 0.0, 0.0)}
    with monitor_collectives(), pytest.raises(RuntimeError, match="an event"):
        comm_watch.monitored(EP, OnCuda(), Two(), lambda: work)
