"""An engine from outside the repository: written here, named on the command line, run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.launch import Engine, EngineJob, engine_named, name_of
from cluster.launch.node import job_variable, node_script
from cluster.launch.testing import EngineContract
from convoy.commands.command_line import main
from tests.convoy.commands.test_launch import write
from tests.support.jobs import prepare_job

NAME = f"{__name__}:Here"


class Here:
    """Runs the whole job on this machine, and lets each node say what it got."""

    brings_spec = False
    tells_end = True
    container_workdir = None

    def render(self, job: EngineJob) -> str:
        script = node_script(job, [NAME, '"$job"', "greet"])
        return "\n".join([*job.head(), job_variable(job), script]) + "\n"

    def check(self, job: EngineJob) -> None:
        if job.launch.queue is not None:
            raise ValueError(f"launch.queue ({job.launch.queue}): this machine has no queue")

    def submit(self, job: EngineJob, text: str) -> str:
        self.check(job)
        ended = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
        return ended.stdout.strip()

    def submitted(self, job: EngineJob, number: str) -> list[str]:
        return [f"answer {number}"]

    def on_node(self, job: EngineJob, *words: str) -> int:
        print(*words, job.name, *job.rank_words[-1:])
        return 0


class TestHere(EngineContract):
    def make_engine(self) -> Engine:
        return Here()


def test_an_engine_from_outside_prints_and_starts_a_job(tmp_path, capsys, monkeypatch):
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    prepare_job(tmp_path)
    capsys.readouterr()
    spec = write(tmp_path, launch={"python": sys.executable})
    assert main(arguments=["launch", spec, "--on", NAME]) == 0
    assert f"-m cluster.launch.node {NAME}" in capsys.readouterr().out
    assert main(arguments=["launch", spec, "--on", NAME, "--submit"]) == 0
    assert capsys.readouterr().out.endswith(f"answer greet tiny {spec}\n")
    queued = ["launch", spec, "--on", NAME, "--submit", "--set", "launch.queue=batch"]
    assert main(arguments=queued) == 2
    assert "launch.queue (batch): this machine has no queue" in capsys.readouterr().err


class Half:
    brings_spec = False

    def render(self, job: EngineJob) -> str:
        return ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("slrum", "--on (slrum) must be one of torchrun, slurm, ray, kubernetes, or "
         "package.module:Class"),
        ("no_such_package.x:Y", "--on (no_such_package.x:Y) must name a class: No module named"),
        (f"{__name__}:Nobody", "must name a class: module"),
        (f"{__name__}:NAME", "must name a class with the protocol cluster.launch.engines.Engine"),
        (f"{__name__}:Half", "the class Half lacks tells_end, container_workdir, check, submit, "
         "submitted, on_node of the protocol cluster.launch.engines.Engine"),
    ],
)  # fmt: skip
def test_a_name_that_is_no_engine_is_refused_in_one_line(name, message, tmp_path, capsys):
    assert main(arguments=["launch", write(tmp_path), "--on", name]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_names_are_found_again():
    assert name_of(Here()) == NAME
    assert name_of(engine_named("slurm")) == "slurm"
