"""A run on a real local Ray of two workers: one is killed, and the run goes on."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from convoy.commands.command_line import main
from tests.support.jobs import data_of, events, prepare_job, write_spec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed"),
]
ROOT = Path(__file__).parents[2]
STEPS, BATCH = 40, 4


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def make_spec(folder: Path, job: Path, **sections: Any) -> Path:
    return write_spec(
        folder,
        data=sections.pop("data", data_of(job)),
        model={"d_model": 48, "first_k_dense": 2},
        moe={"num_experts": 12, "top_k": 2, "d_ff": 48},
        parallel={"ep": 2},
        batch={"global_batch_size": BATCH, "micro_batch_size": 1},
        train={"steps": STEPS, "timeout_seconds": 60.0},
        checkpoint={"interval_steps": 3},
        launch={"ranks_per_node": 2} | sections.pop("launch", {}),
        **sections,
    )


@contextlib.contextmanager
def submitted(spec: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``convoy launch --submit`` on a Ray of its own; whatever it has started is ended."""
    mark = uuid.uuid4().hex
    environment = {
        **os.environ, "CONVOY_TEST_MARK": mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "local", "RAY_TMPDIR": "/tmp", "RAY_USAGE_STATS_ENABLED": "0",
        # A busy machine is slow to start processes.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
        "RAY_worker_register_timeout_seconds": "600",
        "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": "600", "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": "600",
        "RAY_AUTH_MODE": "disabled", "RAY_gcs_server_request_timeout_seconds": "600",
    }  # fmt: skip
    launch = [sys.executable, "-m", "convoy", "launch"]
    words = [*launch, str(spec), "--on", "ray", "--submit"]
    with (folder / "ray.txt").open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    try:
        yield process, mark
    finally:
        # Ray's daemons leave their parent.
        while pids := marked(mark):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.1)


def marked(mark: str) -> list[int]:
    """The processes that have a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"CONVOY_TEST_MARK={mark}".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def ranks_of(mark: str) -> list[int]:
    """The processes that train: those that Ray's workers have started."""
    found = []
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            above = Path(f"/proc/{parent(pid)}/cmdline").read_bytes()
            if b"convoy" in words and b"ray::" in above:
                found.append(pid)
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split("PPid:")[1].split()[0])


def wait(process: subprocess.Popen[bytes], folder: Path, what: Callable[[], Any]) -> None:
    until = time.monotonic() + 900
    while not what():
        assert process.poll() is None, (folder / "ray.txt").read_text()[-4000:]
        assert time.monotonic() < until, (folder / "ray.txt").read_text()[-4000:]
        time.sleep(0.2)


def newest_step(run: Path) -> int:
    if not (run / "log.jsonl").exists():
        return 0
    return max((event["step"] for event in events(run, "step")), default=0)


@pytest.mark.parametrize("victim", ["a rank", "a worker"])
def test_a_lost_process_is_replaced_and_the_run_goes_on(victim, tmp_path, job):
    run = tmp_path / "run"
    with submitted(make_spec(tmp_path, job), tmp_path) as (process, mark):
        wait(process, tmp_path, lambda: newest_step(run) >= 5)
        rank = ranks_of(mark)[-1]
        os.kill(rank if victim == "a rank" else parent(rank), signal.SIGKILL)
        assert process.wait(timeout=900) == 0, (tmp_path / "ray.txt").read_text()[-4000:]
    taken, starts = events(run, "step"), events(run, "start")
    assert [event["world_size"] for event in starts] == [2, 2]
    assert sorted({event["step"] for event in taken}) == list(range(1, STEPS + 1))
    assert all(event["consumed_samples"] == event["step"] * BATCH for event in taken)
    assert starts[1]["step"] >= 3, "it resumed from a checkpoint"


def test_2_ends_the_program_without_another_start(tmp_path, job):
    corpus = {"source": str(tmp_path / "none"), "path": str(tmp_path / "no-corpus")}
    with submitted(make_spec(tmp_path, job, data=corpus), tmp_path) as (process, _):
        assert process.wait(timeout=900) == 2, (tmp_path / "ray.txt").read_text()[-4000:]
    assert json.loads((tmp_path / "run" / "status.json").read_text())["exit_code"] == 2


def test_a_program_is_printed_without_ray(tmp_path, job, capsys):
    assert main(arguments=["launch", str(make_spec(tmp_path, job)), "--on", "ray"]) == 0
    compile(capsys.readouterr().out, "program", "exec")
