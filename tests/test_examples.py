"""The rendered jobs in examples/ are those that ``convoy launch`` prints today."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.commands import main

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
