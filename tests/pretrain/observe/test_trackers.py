"""Trackers get a run's values, go on with it after a restart, and never end or delay it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt import read_manifest
from pretrain.errors import InputError
from pretrain.observe import (
    Evaluated,
    IntervalEnded,
    RunDone,
    RunFailed,
    RunStarted,
    code_version,
    experiment_record,
)
from pretrain.observe.testing import TrackerContract
from pretrain.observe.tracking import About, Tracking, about_of, open_trackers
from pretrain.spec import TrackingConfig, load_spec
from tests.pretrain.observe.test_observe import REPORTED, STARTED, pretrain_on_rank
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[3]
START = RunStarted(
    step=0, **STARTED, record={"run_id": "0123456789abcdef", "code": "c0ffee"},
    spec={"train": {"steps": 6, "time": None}, "name": "tiny"},
)  # fmt: skip


class Recorded:
    """A tracker that keeps what it is told, and can be slow or break."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.go = threading.Event()
        self.go.set()
        self.breaks_at = -1

    def start(self, about: About) -> None:
        self.told.append(about)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.go.wait(60)
        if step == self.breaks_at:
            raise ConnectionError("the server\nis gone")
        self.told.append((step, dict(values)))

    def finish(self, *, ok: bool) -> None:
        self.told.append(ok)


def interval(step: int, loss: float = 2.5) -> IntervalEnded:
    return IntervalEnded(step=step, loss=loss, seconds=2.0, **REPORTED)


def test_a_tracker_gets_spec_record_and_values_and_how_the_run_ended():
    tracker = Recorded()
    sink = Tracking("mine", tracker)
    for event in (
        interval(1), START, interval(2), interval(4, float("nan")),
        Evaluated(step=4, loss=1.0, bits_per_byte=2.0), RunDone(step=6),
    ):  # fmt: skip
        sink(event)
    sink.close()
    about, second, fourth, scored, ok = tracker.told
    assert about.run_id == "0123456789abcdef"
    assert about.parameters["train.steps"] == "6"
    assert about.parameters["record.code"] == "c0ffee"
    assert "train.time" not in about.parameters
    assert second == (2, second[1])
    assert second[1]["train/loss"] == 2.5
    assert second[1]["speed/tokens_per_second"] == 512.0
    assert "train/loss" not in fourth[1], "what is no number is left out"
    assert scored == (4, {"eval/loss": 1.0, "eval/bits_per_byte": 2.0})
    assert ok is True
    failed = Recorded()
    sink = Tracking("mine", failed)
    sink(START)
    sink(RunFailed(step=1, state="crashed", reason="x"))
    sink.close()
    assert failed.told[-1] is False


def test_a_tracker_that_breaks_is_told_once_and_the_run_goes_on(capsys):
    tracker = Recorded()
    tracker.breaks_at = 2
    sink = Tracking("mine", tracker)
    for event in (START, interval(1), interval(2), interval(3), RunDone(step=3)):
        sink(event)
    sink.close()
    assert [each[0] for each in tracker.told[1:]] == [1]
    assert capsys.readouterr().err == (
        "error: tracker mine ends; training goes on: the server is gone\n"
    )


def test_training_does_not_wait_for_a_tracker_and_what_it_missed_is_counted(capsys):
    tracker = Recorded()
    tracker.go.clear()
    sink = Tracking("mine", tracker)
    sink(START)
    for step in range(1, 1500):
        sink(interval(step))  # would wait for ever, if it waited
    sink(RunDone(step=1500))
    tracker.go.set()
    sink.close()
    steps = [each[0] for each in tracker.told[1:] if isinstance(each, tuple)]
    assert steps == list(range(1, len(steps) + 1))
    assert 900 < len(steps) < 1499
    assert tracker.told[-1] is True
    assert f"too slow for {1499 - len(steps)} values" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_one_line(name, tmp_path, monkeypatch):
    # Adapters tell their packages by the environment where files go; later tests have none of it.
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    wanted = rf"tracking.to names {name}, .*pip install -e '\.\[{name}\]'"
    with pytest.raises(InputError, match=wanted):
        open_trackers(TrackingConfig(to=[name]), tmp_path)


def test_wandb_is_called_as_its_interface_is(tmp_path, monkeypatch):
    calls: list[tuple[str, Any]] = []

    class Run:
        def define_metric(self, name: str, *, step_metric: str) -> None:
            calls.append(("define", step_metric))

        def log(self, values: dict[str, float]) -> None:
            calls.append(("log", values))

        def finish(self, *, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    class Module:
        @staticmethod
        def init(**words: Any) -> Run:
            calls.append(("init", words))
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", Module)
    (sink,) = open_trackers(TrackingConfig(to=["wandb"], project="p"), tmp_path)
    for event in (START, interval(2), RunDone(step=6)):
        sink(event)
    sink.close()
    assert [name for name, _ in calls] == ["init", "define", "log", "finish"]
    words = calls[0][1]
    assert (words["project"], words["id"], words["resume"]) == (
        "p",
        about_of(START).run_id,
        "allow",
    )
    assert calls[2][1]["step"] == 2
    assert calls[3][1] == 0


class JsonLines:
    """A tracker from outside: values as lines of a file."""

    def __init__(self, config: TrackingConfig, run_dir: Path) -> None:
        assert config.project
        self.path = run_dir / "values.jsonl"

    def start(self, about: About) -> None:
        self.run_id = about.run_id
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file = self.path.open("a")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        lines = ({"step": step, "name": name, "value": value} for name, value in values.items())
        self.file.writelines(json.dumps(line) + "\n" for line in lines)

    def finish(self, *, ok: bool) -> None:
        self.file.close()


def written(run_dir: Path) -> dict[tuple[str, int], float]:
    lines = map(json.loads, (run_dir / "values.jsonl").read_text().splitlines())
    return {(line["name"], line["step"]): line["value"] for line in lines}


class TestFromOutside(TrackerContract):
    to = f"{__name__}:JsonLines"

    def kept(self, run_dir: Path) -> Mapping[tuple[str, int], float]:
        return written(run_dir)


class TestWandB(TrackerContract):
    """On a stand-in with W&B's interface: W&B itself needs an account."""

    to = "wandb"

    @pytest.fixture(autouse=True)
    def _stand_in(self, monkeypatch):
        self.runs = runs = {}

        class Run:
            def __init__(self, values: dict[tuple[str, int], float]) -> None:
                self.values = values

            def define_metric(self, name: str, *, step_metric: str) -> None:
                assert (name, step_metric) == ("*", "step")

            def log(self, values: dict[str, float]) -> None:
                step = values.pop("step")
                self.values |= {(name, step): value for name, value in values.items()}

            def finish(self, *, exit_code: int) -> None:
                assert exit_code in (0, 1)

        def init(**words: Any) -> Run:
            assert words["resume"] == "allow"
            return Run(runs.setdefault(words["id"], {}))

        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))

    def kept(self, run_dir: Path) -> Mapping[tuple[str, int], float]:
        (values,) = self.runs.values()
        return values


class TestTensorBoard(TrackerContract):
    to = "tensorboard"

    def kept(self, run_dir: Path) -> Mapping[tuple[str, int], float]:
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        events = accumulator.EventAccumulator(str(run_dir / "tensorboard")).Reload()
        names = events.Tags()["scalars"]
        return {(name, row.step): row.value for name in names for row in events.Scalars(name)}

    @pytest.fixture(autouse=True)
    def _installed(self):
        pytest.importorskip("tensorboard")


class TestMLflow(TrackerContract):
    to = "mlflow"

    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch):
        self.mlflow = pytest.importorskip("mlflow")
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")

    def kept(self, run_dir: Path) -> Mapping[tuple[str, int], float]:
        client = self.mlflow.MlflowClient((run_dir / "mlflow").as_uri())
        experiment = client.get_experiment_by_name("convoy")
        (run,) = client.search_runs([experiment.experiment_id])
        return {
            (name, row.step): row.value
            for name in run.data.metrics
            for row in client.get_metric_history(run.info.run_id, name)
        }


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no.such:Tracker", "No module named 'no'"),
        (f"{__name__}:NoTracker", "has no attribute 'NoTracker'"),
        (f"{__name__}:Recorded", "positional argument"),
        ("types:SimpleNamespace.fromkeys", "has no attribute 'fromkeys'"),
        (f"{__name__}:interval", "no method start"),
    ],
)
def test_a_tracker_that_cannot_be_is_one_line(name, why, tmp_path):
    with pytest.raises(InputError, match=rf"tracking.to \({name}\) .*{why}") as error:
        open_trackers(TrackingConfig(to=[name]), tmp_path)
    assert "\n" not in str(error.value)


def test_a_tracker_without_a_name_or_a_class_is_refused_with_the_spec(tmp_path):
    spec = write_spec(tmp_path, tracking={"to": ["wandbb"]})
    with pytest.raises(
        InputError, match=r"tracking\.to \(wandbb\) must be tensorboard, .*module:Class"
    ):
        load_spec(spec)


def test_a_tracker_from_outside_gets_the_values_of_a_real_run(tmp_path):
    data, to = data_of(prepare_job(tmp_path)), [TestFromOutside.to]
    spec = write_spec(
        tmp_path, data=data, tracking={"to": to}, eval={"sequences": 2}, train={"steps": 4}
    )
    ((code, said, _),) = run_ranks(pretrain_on_rank, 1, str(spec), group=False)
    assert code == 0, said
    values = written(tmp_path / "run")
    intervals = events(tmp_path / "run", "interval")
    losses = {step: value for (name, step), value in values.items() if name == "train/loss"}
    assert losses == {line["step"]: line["loss"] for line in intervals}
    assert [line["step"] for line in intervals] == [2, 4]
    assert ("speed/goodput", 4) in values
    assert ("eval/bits_per_byte", 4) in values


def test_the_experiment_record_names_the_code_and_the_data():
    record = experiment_record(corpus="d00d", run_id="1")
    assert record["corpus"] == "d00d"
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    assert record.get("code", "").removesuffix("+changes") == commit
    assert record["python"].startswith("3.")
    assert "torch" in record
    assert code_version() == record.get("code", "")


# ------------------------------------------------------------------------------------------------
# Real runs, in processes of their own: a start, and a resume.


def run_twice(folder: Path, name: str, **environment: str) -> list[dict[str, Any]]:
    """A run of 4 steps that is extended to 6; the log's intervals."""
    data = data_of(prepare_job(folder))
    sections = {"data": data, "tracking": {"to": [name]}, "eval": {"sequences": 2}}
    for steps in (4, 6):
        spec = write_spec(
            folder, **sections, train={"steps": steps}, schedule={"kind": "constant"}
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, str(ROOT / "tools" / "pretrain.py"), str(spec)],
            capture_output=True, text=True, env={**os.environ, **environment}, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert "tracker" not in done.stderr, done.stderr
    return events(folder / "run", "interval")


@pytest.mark.slow
def test_mlflow_has_the_values_of_both_starts_in_one_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    intervals = run_twice(tmp_path, "mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient((tmp_path / "run" / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("convoy")
    (run,) = client.search_runs([experiment.experiment_id])
    found = client.get_metric_history(run.info.run_id, "train/loss")
    assert {m.step: m.value for m in found} == {i["step"]: i["loss"] for i in intervals}
    assert [i["step"] for i in intervals] == [2, 4, 6]
    assert run.info.status == "FINISHED"
    assert run.data.params["train.steps"] == "4"
    assert run.data.tags["train.steps"] == "6", "what changed is a tag"
    spec = load_spec(tmp_path / "spec.json")
    assert run.data.tags["spec_hash"] == spec.hash
    (_, start) = events(tmp_path / "run", "start")
    assert start["spec"] == spec.as_dict()
    manifest = read_manifest(tmp_path / "run" / "checkpoints")
    assert manifest.state["code"] == code_version() == start["record"].get("code", "")
    assert manifest.state["corpus"] == start["record"]["corpus"]


@pytest.mark.slow
def test_trackio_has_the_values_of_both_starts_in_one_run(tmp_path):
    pytest.importorskip("trackio")
    intervals = run_twice(tmp_path, "trackio")
    (file,) = (tmp_path / "run" / "trackio").glob("*.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("SELECT run_name, step, metrics FROM metrics").fetchall()
    values = [(step, json.loads(text)) for _, step, text in rows]
    losses = {step: each["train/loss"] for step, each in values if "train/loss" in each}
    assert losses == {i["step"]: i["loss"] for i in intervals}
    assert len({name for name, _, _ in rows}) == 1


@pytest.mark.slow
def test_tensorboard_has_the_values_of_both_starts(tmp_path):
    pytest.importorskip("tensorboard")
    intervals = run_twice(tmp_path, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    losses = {each.step: each.value for each in found.Scalars("train/loss")}
    assert losses == pytest.approx({i["step"]: i["loss"] for i in intervals})
