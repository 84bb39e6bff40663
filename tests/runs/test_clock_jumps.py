"""Runs whose wall clock jumps by hours, forward and backward, many times: nothing is lost, nothing
hangs by mistake, no limit is moved, and what is kept is decided by steps."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

import ckpt
from convoy.audit import arrays_that_differ, audit_data
from pretrain.observe import ledger_of, read_log
from tests.support import faulty_libc
from tests.support.jobs import data_of, events, events_so_far, prepare_job, write_spec

ROOT = Path(__file__).parents[2]
JUMPS = "0.7 0 18000 -36000 3600 -90000"
"""Every 0.7 s: 5 hours ahead, 10 hours behind, an hour ahead, more than a day behind."""


def steps_so_far(run: Path) -> int:
    return sum(event["event"] == "step" for event in events_so_far(run))


def test_the_wall_clock_of_a_program_jumps():
    code = "import time\nfor _ in range(5): print(time.time()); time.sleep(0.7)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=faulty_libc.environment(clock=JUMPS),
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    times = [float(line) for line in done.stdout.split()]
    assert max(times) - min(times) > 10_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_under_a_clock_that_jumps_is_the_run_under_one_that_does_not(tmp_path, ranks):
    """With heartbeats, a time limit of an hour, saves and retention; the run goes through a stop by
    a notice file, and a resume."""
    data, runs = data_of(prepare_job(tmp_path / "job")), {}
    for name, clock in (("calm", None), ("jumps", JUMPS)):
        folder = tmp_path / name
        folder.mkdir()
        spec = write_spec(
            folder, data=data, parallel={"dp_shard": ranks},
            train={"steps": 60, "timeout_seconds": 30.0, "time_limit_seconds": 3600.0},
            checkpoint={"interval_steps": 5, "retention": {"keep": 2, "keep_every": 20}},
            detection={"stuck_seconds": 20.0},
        )  # fmt: skip
        runs[name] = folder / "run"
        notice = folder / "notice"
        env = {**faulty_libc.environment(clock=clock), "CONVOY_NOTICE_FILE": str(notice)}
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                 f"--nproc-per-node={ranks}", "-m", "convoy", "pretrain", str(spec)]  # fmt: skip
        with (folder / "said.txt").open("w") as said:
            first = subprocess.Popen(words, env=env, cwd=ROOT, stdout=said, stderr=said)
            try:
                while first.poll() is None and not (runs[name] / "log.jsonl").exists():
                    time.sleep(0.05)
                while first.poll() is None and steps_so_far(runs[name]) < 12:
                    time.sleep(0.05)
                notice.touch()
                first.wait(300)
            finally:
                first.kill()
                first.wait()
            stopped = events(runs[name], "stopped")
            assert len(stopped) == 1, (folder / "said.txt").read_text()
            notice.unlink()
            subprocess.run(words, env=env, cwd=ROOT, stdout=said, stderr=said, check=True)

    assert ckpt.committed_steps(runs["jumps"] / "checkpoints") == [20, 40, 55, 60]
    losses = [
        {event["step"]: event["loss"] for event in events(run, "step")} for run in runs.values()
    ]
    assert losses[0] == losses[1]
    assert len(losses[1]) == 60
    folders = [runs[name] / "checkpoints" for name in ("jumps", "calm")]
    assert arrays_that_differ(*folders, 60) == []
    assert not audit_data(runs["jumps"]).problem
    lines = read_log(runs["jumps"] / "log.jsonl").lines
    times = [line.time for line in lines]
    assert max(times) - min(times) > 10_000, "the clock has jumped"
    for kind in ("rank_stuck", "rank_lost", "failed"):
        assert not events(runs["jumps"], kind), kind
    ledger = ledger_of(lines)
    assert ledger.wall_seconds >= 0
