"""Measured rates of this machine as a cluster file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from convoy.commands.command_line import main
from convoy.plan import load_cluster
from convoy.plan.calibration import calibrate

ROOT = Path(__file__).resolve().parents[3]


def test_the_rates_of_a_known_machine_come_back(monkeypatch):
    """Times that a chip of other rates would take give that chip's curve."""
    base = load_cluster("cpu")
    known = base.chip.model_copy(update={
        "peak_teraflops": {"float32": 0.2},
        "gemm": base.chip.gemm.model_copy(
            update={"best": {"float32": 0.94}, "tile": 32, "half_depth": 32.0}
        ),
        "memory_efficiency": 0.45,
    })  # fmt: skip
    monkeypatch.setattr(
        "convoy.plan.calibration._gemm_seconds",
        lambda shape, dtype, device: known.gemm_seconds(*shape, dtype),
    )
    launch = known.gemm.launch_microseconds * 1e-6
    for name, value in (("_stream_rate", 2e10), ("_elementwise_rate", 9e9),
                        ("_launch_seconds", launch)):  # fmt: skip
        monkeypatch.setattr(f"convoy.plan.calibration.{name}", lambda device, value=value: value)

    def attention(chip, dtype, device):
        return chip

    monkeypatch.setattr("convoy.plan.calibration._with_attention", attention)
    found = calibrate(base, torch.device("cpu"))
    assert found.chip.memory_gigabytes_per_second == pytest.approx(20.0)
    assert found.chip.stream_seconds(9e9) == pytest.approx(1.0)
    assert found.chip.gemm.launch_microseconds == pytest.approx(5.0)
    for m, n, k in ((1000, 1000, 1000), (200, 400, 100), (64, 512, 2048)):
        seconds = known.gemm_seconds(m, n, k, "float32")
        assert found.chip.gemm_seconds(m, n, k, "float32") == pytest.approx(seconds, rel=0.1)
    assert found.intra_node == base.intra_node
    assert found.dollars_per_gpu_hour == base.dollars_per_gpu_hour


@pytest.mark.slow
def test_ranks_measure_together_and_the_file_plans(tmp_path, capsys):
    file = tmp_path / "here.toml"
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "convoy", "plan", "--calibrate", str(file)],
        cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written to") == 1
    found, base = load_cluster(str(file)), load_cluster("cpu")
    assert found.intra_node != base.intra_node
    assert found.inter_node == base.inter_node
    recipe = str(ROOT / "tools/recipes/stdlib-tiny.toml")
    assert main("plan", [recipe, "--cluster", str(file), "--gpus", "2"]) == 0
    assert "ep=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--calibrate", "nowhere/here.toml"], "--calibrate (nowhere/here.toml): its folder does"),
        (["spec.toml", "--calibrate", "here.toml"], "SPEC (spec.toml) must be left out with --cal"),
        (["--calibrate", "here.toml", "--cluster", "h9"], "--cluster (h9) must be a file, or one"),
    ],
)
def test_arguments_that_cannot_be_used(words, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main("plan", words) == 2
    error = capsys.readouterr().err
    assert line in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
