"""What every engine promises, as tests for pytest that the engines of the house pass.

Subclass :class:`EngineContract` as a class ``Test...``, and make your engine in ``make_engine``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.launch.config import LaunchConfig
from cluster.launch.engines import Engine, engine_named, name_of
from cluster.launch.job import EngineJob
from parallel.version import VERSION


class EngineContract:
    """The tests. None needs a cluster, a network or the engine's own programs."""

    def make_engine(self) -> Engine:
        """The engine under test."""
        raise NotImplementedError

    def make_job(self, folder: Path) -> EngineJob:
        """A job that the engine can render; its folders are below ``folder``, which is empty.

        Override it where the engine needs more of ``[launch]``.
        """
        return EngineJob(
            launch=LaunchConfig(
                nodes="2:4",
                ranks_per_node=2,
                workdir=str(folder),
                python=sys.executable,
                environment={"TEXT": "a 'b' $c"},
                setup=["export FROM_SETUP='of \"this\"'"],
            ),
            name="Run_1.a",
            version=VERSION,
            program=("-m", "package", "train"),
            config=str(folder / "spec.toml"),
            overrides=("--set", 'data.source="a b"'),
            config_text=json.dumps({"name": "Run_1.a", "text": 'a "b"', "empty": ""}),
            run_dir=str(folder / "my runs" / "run"),
            checkpoints=str(folder / "my runs" / "run" / "checkpoints"),
            notes=("Run_1.a: a line for people",),
        )

    def test_the_engine_is_found_by_its_name(self) -> None:
        """``--on`` and the node program find the class again, and make it without arguments."""
        engine = self.make_engine()
        assert type(engine_named(name_of(engine))) is type(engine)

    def test_what_the_spec_is_checked_for_is_said(self) -> None:
        """The attributes have the protocol's types."""
        engine = self.make_engine()
        assert isinstance(engine.brings_spec, bool)
        assert isinstance(engine.tells_end, bool)
        folder = engine.container_workdir
        assert folder is None or Path(folder).is_absolute()

    def test_a_job_is_rendered_without_a_cluster(self) -> None:
        """Rendering touches nothing, asks nobody, and gives the same text again."""
        with tempfile.TemporaryDirectory() as name:
            job = self.make_job(Path(name))
            text = self.make_engine().render(job)
            assert text == self.make_engine().render(job)
            assert list(Path(name).iterdir()) == []
        assert text.endswith("\n")
        assert not text.endswith("\n\n")

    def test_people_are_told_first_what_runs_and_where_the_log_is(self) -> None:
        """The lines of :meth:`EngineJob.head` are at the top."""
        with tempfile.TemporaryDirectory() as name:
            job = self.make_job(Path(name))
            lines = self.make_engine().render(job).splitlines()[: len(job.head()) + 1]
        assert set(job.head()) <= set(lines)

    def test_a_refusal_is_one_line_and_starts_nothing(self) -> None:
        """``check`` takes the job, or raises ValueError for people; its folders stay as they are.

        The job's image and folders do not exist, so many engines refuse it.
        """
        with tempfile.TemporaryDirectory() as name:
            refusal = None
            try:
                self.make_engine().check(self.make_job(Path(name)))
            except ValueError as error:
                refusal = str(error)
            assert refusal is None or (refusal and "\n" not in refusal)
            assert list(Path(name).iterdir()) == []

    def test_lines_about_a_submitted_job_are_single_lines(self) -> None:
        """``submitted`` says where the output is and how to stop the job, or nothing."""
        with tempfile.TemporaryDirectory() as name:
            lines = self.make_engine().submitted(self.make_job(Path(name)), "17")
        assert isinstance(lines, list)
        assert all("\n" not in line for line in lines)

    def test_a_node_of_another_version_is_refused(self) -> None:
        """The node program knows the engine by its name, and compares the versions first."""
        with tempfile.TemporaryDirectory() as name:
            job = json.loads(self.make_job(Path(name)).for_nodes())
            job |= {"version": "0.0", "a_field_of_0.0": 1}
            ended = subprocess.run(
                [
                    sys.executable, "-m", "cluster.launch.node", name_of(self.make_engine()),
                    json.dumps(job),
                ],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                capture_output=True, text=True, timeout=120, check=False,
            )  # fmt: skip
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.startswith("error: node ")
        assert "and the launch is of 0.0" in ended.stderr
        assert ended.stderr.count("\n") == 1
