"""Runs whose layout the planner chooses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt
from convoy.commands.command_line import main
from convoy.plan import automatic, spec_with_plan
from pretrain.spec.read import load_spec
from tests.support.jobs import data_of, events, make_spec, prepare_job, write_spec

ROOT = Path(__file__).resolve().parents[3]
AUTO = {"plan": {"cluster": "cpu"}}


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_the_layout_is_for_the_ranks_and_fixed(world, tmp_path):
    spec = make_spec(tmp_path, **AUTO)
    planned, plan = automatic(spec, world, ranks_per_node=2)
    assert planned.parallel.topology(world).world == world
    assert planned.parallel.dp_shard != -1
    assert planned.plan.cluster is None
    assert planned.topology(world) == plan.work.topology
    assert planned.batch.micro_batch_size == plan.work.micro_batch_size
    assert planned.batch.global_batch_size == spec.batch.global_batch_size
    assert automatic(spec, world, ranks_per_node=2)[0] == planned
    assert spec_with_plan(spec, plan) == planned


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (AUTO | {"elastic": {"enabled": True}}, "must be left out with elastic.enabled (true)"),
        (
            AUTO | {"parallel": {"ep": 2}},
            "parallel.ep (2) must be left out with plan.cluster",
        ),
    ],
)
def test_what_contradicts_a_planned_layout_is_refused(sections, line, tmp_path, capsys):
    assert main("pretrain", [str(write_spec(tmp_path, **sections))]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1


def test_a_cluster_that_is_not_there_is_told_before_the_run(tmp_path, capsys):
    spec = write_spec(tmp_path, plan={"cluster": "h9000"})
    assert main("pretrain", [str(spec)]) == 2
    assert "plan.cluster (h9000) must be a file, or one of" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_takes_the_planned_layout_and_has_the_numbers_of_the_written_one(tmp_path):
    job, losses = prepare_job(tmp_path), {}
    for name, sections in (("auto", AUTO), ("written", {})):
        folder = tmp_path / name
        folder.mkdir()
        spec = write_spec(folder, data=data_of(job), **sections)
        if name == "written":
            words = [str(spec), "--cluster", "cpu", "--gpus", "2", "--imbalance", "1.1"]
            spec = folder / "planned.toml"
            assert main("plan", [*words, "--write", str(spec)]) == 0
            assert load_spec(spec).parallel.dp_shard != -1
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
             "tools/pretrain.py", str(spec)],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert ("plan.cluster gives" in done.stdout) == (name == "auto")
        losses[name] = [e["loss"] for e in events(folder / "run", "step")]
        (start,) = events(folder / "run", "start")
        saved = ckpt.read_manifest(folder / "run/checkpoints").spec
        assert saved["plan"]["cluster"] is None
        degrees = {k: v for k, v in saved["parallel"].items() if k in start["topology"]}
        assert degrees == start["topology"]
    assert losses["auto"] == losses["written"]
