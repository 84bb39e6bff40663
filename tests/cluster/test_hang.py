"""A rank that does not come to a collective ends the run, and the one line says who and where."""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import queue
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from cluster.detect import first_mismatch, read_dumps
from pretrain.data.loader import Loader
from tests.support.commands import pretrain
from tests.support.jobs import prepare_job, write_spec
from tests.support.ranks import start_ranks

pytestmark = pytest.mark.waits

TIMEOUT = {"train": {"timeout_seconds": 4.0, "steps": 6}}


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def a_stuck_loader() -> None:
    step = Loader.step

    def slow(self, cursor, skipped=()):
        if cursor.sample_index >= 16:
            time.sleep(60)
        return step(self, cursor, skipped)

    Loader.step = slow


def a_micro_batch_less() -> None:
    step = Loader.step

    def fewer(self, cursor, skipped=()):
        batches, after = step(self, cursor, skipped)
        return batches[1:] if cursor.sample_index >= 16 else batches, after

    Loader.step = fewer


def a_kill() -> None:
    step = Loader.step

    def end(self, cursor, skipped=()):
        if cursor.sample_index >= 16:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, cursor, skipped)

    Loader.step = end


def a_stop() -> None:
    step = Loader.step

    def stop(self, cursor, skipped=()):
        if cursor.sample_index >= 16:
            os.kill(os.getpid(), signal.SIGSTOP)
        return step(self, cursor, skipped)

    Loader.step = stop


def a_stuck_evaluation() -> None:
    # The room has a function of this name too, which an import statement would give.
    room = importlib.import_module("pretrain.train.evaluate")
    room.read_batch = lambda *_: time.sleep(60)


def a_stuck_start() -> None:
    dist.new_group = lambda *_, **__: time.sleep(60)


def a_stuck_build() -> None:
    room = importlib.import_module("pretrain.train.entry")
    room.build_job = lambda *_: time.sleep(600)


def on_rank(rank: int, spec: str, last, world: int) -> tuple[int, str]:
    if last is a_stuck_build:
        importlib.import_module("pretrain.runtime.ranks")._BUILD_SECONDS = 10.0
    if rank == world - 1:
        last()
    code, _, err = pretrain([spec])
    return code, err


def lines_of(spec: Path, last, world: int, ends: int) -> list[str]:
    """What the ranks say that come to an end, so many of them."""
    processes, results = start_ranks(on_rank, world, str(spec), last, world, group=False)
    ended, until = [], time.monotonic() + 60
    try:
        while len(ended) < ends:
            assert time.monotonic() < until, "the others hang too"
            with contextlib.suppress(queue.Empty):
                _, ok, value = results.get(timeout=0.5)
                assert ok, value
                ended.append(pickle.loads(value))
        processes[-1].join(60 if last is not a_stop else 0)
        # Stuck or not, no rank outlives the report by long. Gloo aborts a rank that receives more
        # bytes than the rank expects.
        ends_itself = 0, 1, -signal.SIGKILL, -signal.SIGABRT
        assert processes[-1].exitcode in (ends_itself if last is not a_stop else (None,))
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert {code for code, _ in ended} == {1}
    lines = [line for _, text in ended for line in text.splitlines()]
    # Rank 0 may say earlier which rank is stuck, see test_heartbeat.
    return [line for line in lines if " stuck in " not in line and "no heartbeat" not in line]


@pytest.mark.parametrize(
    ("last", "ranks", "parallel", "said"),
    [
        pytest.param(
            a_stuck_loader,
            (2, 1),
            {"ep": 2},
            "rank 1: at tests/cluster/test_hang.py:",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            a_micro_batch_less, (2, 1), {"ep": 2}, "rank 1: no answer", marks=pytest.mark.slow
        ),
        pytest.param(a_micro_batch_less, (2, 2), {"pp": 2}, ": waits in ", marks=pytest.mark.slow),
        (a_kill, (3, 2), {"dp_replicate": 3, "dp_shard": 1}, "rank 2: no answer"),
        # Each pipeline's ranks wait in a group of their own, and not in that of all ranks.
        (a_stop, (4, 3), {"pp": 2}, "rank 3: no answer"),
    ],
)
def test_who_does_not_come_is_named(text, tmp_path, last, ranks, parallel, said):
    world, ends = ranks
    spec = write_spec(
        tmp_path, data={"source": str(text / "text"), "path": str(text / "corpus")},
        parallel=parallel, **TIMEOUT,
    )  # fmt: skip
    lines = lines_of(spec, last, world, ends)
    print(lines)
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: after step 2, rank ")
    assert said in lines[0]
    if said.startswith("rank"):
        folder = (
            lines[0].split("convoy inspect flight ")[1].removesuffix(" shows where ranks disagree")
        )
        mismatch = first_mismatch(read_dumps(Path(folder)))
        assert mismatch is not None
        assert world - 1 in mismatch.missing


def test_a_rank_that_does_not_build_is_named(text, tmp_path):
    """Decisions before the first step have a time-out of minutes, and not that of a preparation."""
    spec = write_spec(
        tmp_path, data={"source": str(text / "text"), "path": str(text / "corpus")},
        parallel={"dp_replicate": 2, "dp_shard": 1}, **TIMEOUT,
    )  # fmt: skip
    lines = lines_of(spec, a_stuck_build, 2, 1)
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: before the first step, rank 0: ")
    assert "rank 1: at tests/cluster/test_hang.py:" in lines[0]


@pytest.mark.parametrize("last", [a_stuck_evaluation, a_stuck_start])
def test_other_collectives_than_a_steps_wait_as_long_as_a_steps(text, tmp_path, last):
    """Replicas: an evaluation has no collective but the sums at its end."""
    spec = write_spec(
        tmp_path, data={"source": str(text / "text"), "path": str(text / "corpus")},
        parallel={"dp_replicate": 2, "dp_shard": 1}, eval={"interval_steps": 2}, **TIMEOUT,
    )  # fmt: skip
    processes, results = start_ranks(on_rank, 2, str(spec), last, 2, group=False)
    try:
        _, ok, value = results.get(timeout=50)  # far below the hour of a rank that works alone
    finally:
        for process in processes:
            process.kill()
            process.join()
    # The run says so in one line, or, where it has not begun, by torch's own error.
    assert pickle.loads(value)[0] == 1 if ok else "imed out" in value or "imeout" in value
