"""The rendered jobs in examples/ are those that ``convoy launch`` prints today."""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from convoy.commands.command_line import main
from tests.support.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
IMAGE = ("--set", "launch.image=registry.example/convoy:0.1.0")


@pytest.mark.parametrize(
    ("engine", "name", "more"),
    [
        ("slurm", "slurm.sbatch", ()),
        ("ray", "ray_job.py", ()),
        ("kubernetes", "trainjob.yaml", IMAGE),
    ],
)
def test_a_rendered_example_is_current(engine, name, more, tmp_path, monkeypatch):
    """``make examples`` makes them again."""
    monkeypatch.chdir(EXAMPLES.parent)
    made = tmp_path / name
    words = ["launch", "examples/cluster.toml", "--on", engine, "--output", str(made), *more]
    assert main(arguments=words) == 0
    assert made.read_text() == (EXAMPLES / name).read_text()


def own_loop(folder: Path, ranks: int, steps: int) -> list[str]:
    words = [sys.executable]
    if ranks > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    words += [str(EXAMPLES / "own_loop.py"), "--steps", str(steps), "--checkpoints", str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def on_rank(rank: int, folder: Path, steps: int) -> list[str]:
    sys.argv = ["own_loop.py", "--steps", str(steps), "--checkpoints", str(folder)]
    said = io.StringIO()
    with redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    return said.getvalue().splitlines()


def test_a_loop_of_ones_own_goes_on_with_fewer_ranks(tmp_path):
    # A warning is an error in ranks, as in pytest.
    first, _ = run_ranks(on_rank, 2, tmp_path / "a", 10, group=False)
    (then,) = run_ranks(on_rank, 1, tmp_path / "a", 20, group=False)
    assert [line.split()[1] for line in (*first, *then)] == ["10", "20"]
    assert float(then[0].split()[-1]) < float(first[0].split()[-1])


def said_by(name: str) -> list[str]:
    said = io.StringIO()
    with redirect_stdout(said):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return said.getvalue().splitlines()


def test_a_router_in_a_module_of_ones_own_learns_with_equal_loads():
    first, last = said_by("router_only.py")
    assert float(last.split()[3]) < float(first.split()[3]) < 0.3
    loads = [int(load.strip("[],")) for load in last.split()[5:]]
    assert sum(loads) == 2 * 256
    assert max(loads) < 1.2 * min(loads)


def test_a_dense_model_becomes_a_mixture_of_experts():
    replaced, differs, moved, upcycled = said_by("dense_to_moe.py")
    assert replaced.startswith("replaced: loss 0.")
    assert float(differs.split()[-1]) < 1e-5
    assert moved == "19 of 19 parameters moved, 4 of 4 experts"
    assert float(upcycled.split()[-1]) < float(replaced.split()[-1])


@pytest.mark.slow
def test_a_loop_of_ones_own_goes_on_with_other_ranks(tmp_path):
    parts = own_loop(tmp_path / "a", 1, 20) + own_loop(tmp_path / "a", 2, 40)
    whole = own_loop(tmp_path / "b", 1, 40)
    assert [line.split()[1] for line in parts] == ["10", "20", "30", "40"]
    losses = [[float(line.split()[-1]) for line in lines] for lines in (parts, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=0.05)
    assert losses[0][-1] < losses[0][0] - 0.5
