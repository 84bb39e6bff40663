"""A disk that is full at some operation, or at each, of work on files: the work is done or ends
with one line, nothing half-written looks whole, and the work is done when there is room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckpt
from convoy.audit import arrays_that_differ, audit_data
from pretrain.observe import read_log
from tests.support import faulty_libc
from tests.support.full_disk import SCENARIOS
from tests.support.jobs import data_of, events_so_far, prepare_job, write_spec

ROOT = Path(__file__).parents[2]
FOR_GOOD, TWICE = faulty_libc.ALWAYS, 1


def fill(room: Path, scenario: str, every: int, first: int, failures: int) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.support.full_disk", str(room), scenario]
    words += map(str, (every, first, failures))
    done = subprocess.run(
        words, cwd=ROOT, env=faulty_libc.environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_disk_that_is_full_at_some_operations(tmp_path, scenario):
    counted = fill(tmp_path, scenario, 9, 4, FOR_GOOD)
    assert counted["met"] > 1, counted


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("failures", [FOR_GOOD, TWICE])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_disk_that_is_full_at_each_operation(tmp_path, scenario, failures):
    counted = fill(tmp_path, scenario, 1, 0, failures)
    assert counted["runs"] == counted["operations"], counted
    assert counted["met"] > counted["operations"] // 2 or failures == TWICE, counted


def pretrain(spec: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "convoy", "pretrain", str(spec)]
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def losses(run: Path) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in events_so_far(run) if e["event"] == "step"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_goes_on_or_stops_with_one_line_and_ends_when_there_is_room(tmp_path):
    """In turn the trainer and its writer process meet the full disk, at some operation of each."""
    data = data_of(prepare_job(tmp_path / "job"))
    runs: dict[str, Path] = {}

    def spec_of(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        runs[name] = folder / "run"
        return write_spec(folder, data=data, train={"steps": 12}, checkpoint={"interval_steps": 2})

    calm = pretrain(spec_of("calm"), faulty_libc.environment())
    assert calm.returncode == 0, calm.stdout + calm.stderr
    expected, seen = losses(runs["calm"]), set[int]()
    for failures in (FOR_GOOD, 3):
        for at in (0, 1, 2, 3, 5, 9, 14, 20, 33, 50, 80, 130):
            name = f"{failures}-{at}"
            spec = spec_of(name)
            first = pretrain(spec, faulty_libc.environment(full=(at, failures, runs[name])))
            seen.add(first.returncode)
            told = f"{name}: {first.returncode}\n{first.stdout}\n{first.stderr}"
            assert "Traceback" not in first.stderr, told
            assert first.returncode in (0, 1, 2), told
            store = ckpt.LocalStore(runs[name] / "checkpoints")
            for step in ckpt.committed_steps(store):
                ckpt.verify(store, ckpt.read_manifest(store, step))
            again = pretrain(spec, faulty_libc.environment())
            assert again.returncode == 0, f"{told}\n{again.stdout}\n{again.stderr}"
            found = losses(runs[name])
            assert max(found) == 12
            assert {step: expected[step] for step in found} == found, told
            torn = read_log(runs[name] / "log.jsonl").problems
            assert len(torn) <= (failures == FOR_GOOD), "the line that met the full disk, at most"
            assert arrays_that_differ(store, runs["calm"] / "checkpoints", 12) == []
            if failures != FOR_GOOD:
                assert found == expected, told
                assert not audit_data(runs[name]).problem
    assert len(seen) > 1, "some runs go on, and some end"
