"""Ranks that are stuck, or whose process is stopped, are named before a collective times out."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from cluster.detect import Heartbeat, HeartbeatPublisher, PhaseLimits, StuckWatch, open_store
from cluster.detect.heartbeat import Pulse, publish_seconds
from cluster.detect.stuck import find_stuck
from parallel import CommMonitor
from pretrain.data.loader import Loader
from tests.support.commands import pretrain
from tests.support.jobs import events, prepare_job, write_spec
from tests.support.ranks import start_ranks

pytestmark = pytest.mark.waits

MOVES = Pulse(
    published=1, beats=50, collectives=9, phase="barrier", step=7, still_seconds=1.0,
    limit_seconds=30.0,
)  # fmt: skip
WAITS = replace(MOVES, still_seconds=40.0, waits_in="all_gather of world, number 8")
STUCK = replace(MOVES, beats=49, phase="data", still_seconds=41.0, at="loader.py:9 in step")


# ------------------------------------------------------------------------------------------------
# How long is too long.


def test_a_limit_follows_the_ranks_own_durations_and_never_falls_below_the_least():
    limits = PhaseLimits.of_run(30.0, 300.0)
    assert limits.limit("data", [0.01] * 64) == 30.0
    steady, noisy = limits.limit("data", [60.0] * 64), limits.limit("data", [50.0, 70.0] * 32)
    assert steady == 180.0
    assert noisy == pytest.approx(180.0 + 10 * 1.4826 * 10.0)


def test_a_single_long_stay_changes_no_limit():
    limits = PhaseLimits.of_run(1.0, 300.0)
    usual = [2.0, 2.1, 1.9] * 10
    assert limits.limit("data", [*usual, 1000.0]) == pytest.approx(limits.limit("data", usual), 0.1)


def test_a_phase_without_a_history_has_half_of_the_time_out():
    limits = PhaseLimits.of_run(30.0, 300.0)
    assert limits.limit("data", [0.01] * 7) == 150.0
    assert limits.limit("data", [0.01] * 8) == 30.0
    assert limits.limit("finish", [0.01] * 64) == 1800.0
    # With a short time-out the report still comes before the time-out.
    assert PhaseLimits.of_run(30.0, 4.0).limit("data", [0.01] * 8) == 2.0


def test_thousands_of_ranks_publish_less_often():
    assert publish_seconds(8, 300.0) == 1.0
    assert publish_seconds(10_000, 300.0) == 10.0


# ------------------------------------------------------------------------------------------------
# Who is stuck.


def ranks_of(pulses: list[Pulse], silent: dict[int, float] | None = None) -> list[tuple]:
    found = find_stuck(dict(enumerate(pulses)), silent or {}, 30.0)
    return [(each.ranks, each.has_heartbeat) for each in found]


def test_nobody_is_stuck_while_all_move():
    assert ranks_of([MOVES, MOVES]) == []


def test_the_rank_outside_collectives_is_named_and_not_those_that_wait_for_it():
    assert ranks_of([WAITS, STUCK, WAITS]) == [((1,), True)]
    (found,) = find_stuck({0: WAITS, 1: STUCK}, {}, 30.0)
    assert found.describe() == (
        "rank 1 stuck in data after step 7 for 41 s (limit 30 s); at loader.py:9 in step"
    )


def test_nobody_is_named_while_the_rank_that_others_wait_for_is_within_its_own_limit():
    assert ranks_of([WAITS, replace(STUCK, limit_seconds=100.0)]) == []


def test_of_ranks_outside_collectives_those_that_moved_least_are_named():
    # As on a GPU, where a rank that waits is not known to wait.
    assert ranks_of([replace(WAITS, waits_in=""), STUCK, STUCK]) == [((1, 2), True)]


def test_where_all_wait_each_collective_is_named():
    other = replace(WAITS, waits_in="all_to_all of ep, number 3")
    assert ranks_of([WAITS, WAITS, other]) == [((2,), True), ((0, 1), True)]
    # A rank that has not come as far as the others is the one.
    assert ranks_of([WAITS, WAITS, replace(other, beats=49)]) == [((2,), True)]


def test_a_rank_without_a_heartbeat_is_named_and_one_that_left_is_not():
    assert ranks_of([WAITS, MOVES], {0: 1.0, 1: 31.0}) == [((1,), False)]
    assert ranks_of([MOVES, replace(MOVES, over=True)], {0: 1.0, 1: 31.0}) == []
    # Never published: its process may hang in its start.
    assert ranks_of([WAITS], {0: 1.0, 5: 31.0}) == [((5,), False)]


def test_a_pulse_survives_the_store():
    assert Pulse.decode(STUCK.encode()) == STUCK


# ------------------------------------------------------------------------------------------------
# Threads and processes.


def test_a_stop_is_told_once_and_so_is_its_end():
    """One process: the watch reads what the publisher writes, and the test moves the heartbeat."""
    store, heartbeat, told = HashStore(), Heartbeat(), []
    stuck, moving = threading.Semaphore(0), threading.Semaphore(0)
    publisher = HeartbeatPublisher(
        store, 0, heartbeat=heartbeat, monitor=CommMonitor(), limits=PhaseLimits(0.05, 0.05),
        seconds=0.01,
    )  # fmt: skip
    watch = StuckWatch(
        store, 1, seconds=0.01, silence_limit=1e6, end=None,
        tell=lambda each: (told.append(each), stuck.release()),
        tell_moving=lambda ranks: moving.release(),
    )  # fmt: skip
    try:
        heartbeat.beat("data", 3)
        for _ in range(2):
            assert stuck.acquire(timeout=60)
            heartbeat.beat("data", 3)
            assert moving.acquire(timeout=60)
    finally:
        watch.close()
        publisher.close()
    assert told[-1].ranks == (0,)
    assert (told[-1].phase, told[-1].step) == ("data", 3)
    assert "test_heartbeat.py" in told[-1].place
    assert Pulse.decode(store.get("0")).over


def ended_on_rank(rank: int) -> list[tuple[int, ...]]:
    told: list[tuple[int, ...]] = []
    heartbeat = Heartbeat()
    HeartbeatPublisher(
        open_store("heartbeat"), rank, heartbeat=heartbeat, monitor=CommMonitor(),
        limits=PhaseLimits(2.0, 2.0), seconds=0.1, end=lambda: os._exit(7),
    )  # fmt: skip
    if rank == 1:
        threading.Event().wait()
    StuckWatch(
        open_store("heartbeat"), 2, seconds=0.1, silence_limit=1e6, end=lambda: os._exit(8),
        tell=lambda stuck: told.append(stuck.ranks), tell_moving=lambda ranks: None,
    )  # fmt: skip
    while (1,) not in told:
        heartbeat.beat("data", 0)
        time.sleep(0.05)
    return told


def test_the_process_of_a_stuck_rank_is_ended_and_no_other():
    processes, results = start_ranks(ended_on_rank, 2)
    rank, ok, _ = results.get(timeout=60)
    assert (rank, ok) == (0, True)
    processes[1].join(60)
    assert processes[1].exitcode == 7
    processes[0].kill()


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def train_on_rank(rank: int, spec: str) -> int:
    step = Loader.step

    def stuck(self, cursor, skipped=()):
        if rank == 1 and cursor.sample_index >= 80:
            time.sleep(600)
        return step(self, cursor, skipped)

    Loader.step = stuck
    return pretrain([spec])[0]


def spec_of(text: Path, tmp_path: Path, **detection) -> Path:
    return write_spec(
        tmp_path,
        data={"source": str(text / "text"), "path": str(text / "corpus")},
        parallel={"ep": 2},
        train={"timeout_seconds": 200.0, "steps": 20},
        detection=detection,
    )


def await_event(run: Path, kind: str, **values) -> dict:
    until = time.monotonic() + 90
    while time.monotonic() < until:
        with contextlib.suppress(FileNotFoundError, ValueError):
            for event in events(run, kind):
                if values.items() <= event.items():
                    return event
        time.sleep(0.2)
    raise AssertionError(f"no event {kind} with {values}")


def test_a_run_names_a_stuck_rank_and_goes_on(text, tmp_path):
    processes, _ = start_ranks(
        train_on_rank, 2, str(spec_of(text, tmp_path, stuck_seconds=2.0)), group=False
    )
    run = tmp_path / "run"
    # The busiest machine may delay another rank too; the stuck one is named in any case.
    found = await_event(run, "rank_stuck", ranks=[1], phase="data", step=10, has_heartbeat=True)
    assert "test_heartbeat.py" in found["place"]
    assert found["seconds"] >= found["limit_seconds"] >= 2.0
    assert not found["ends_run"]
    assert all(process.is_alive() for process in processes)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named(text, tmp_path):
    processes, _ = start_ranks(
        train_on_rank, 2, str(spec_of(text, tmp_path, stuck_seconds=5.0)), group=False
    )
    run = tmp_path / "run"
    await_event(run, "step", step=5)
    os.kill(processes[1].pid, signal.SIGSTOP)
    await_event(run, "rank_stuck", ranks=[1], has_heartbeat=False)
    os.kill(processes[1].pid, signal.SIGCONT)
    await_event(run, "rank_moves", ranks=[1])


@pytest.mark.slow
def test_a_run_ends_where_the_spec_asks_for_the_end_of_stuck_ranks(text, tmp_path):
    spec = spec_of(text, tmp_path, stuck_seconds=10.0, end_stuck_run=True)
    processes, results = start_ranks(train_on_rank, 2, str(spec), group=False)
    processes[1].join(90)
    assert processes[1].exitcode == 1
    rank, ok, value = results.get(timeout=60)
    assert (rank, ok) == (0, True), value
    assert await_event(tmp_path / "run", "rank_stuck", ranks=[1])["ends_run"]
