"""RUN_DIR/status.json: how a run ended, for whoever sees torchrun's exit code alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt import CheckpointError
from convoy.commands.command_line import main
from convoy.commands.pretrain import main as pretrain
from parallel.layout import Topology
from pretrain.errors import HealthError, InputError, LostRankError
from pretrain.observe import RunStopped, last_step
from pretrain.observe.status import Status, StatusFile, outcome_of, read_status
from pretrain.runtime.locks import lock_folder
from tests.runs.test_runs import launch
from tests.support.checkpoints import save_with_threads
from tests.support.jobs import data_of, prepare_job, write_corpus, write_spec


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


def found(run: Path) -> Status:
    status = read_status(run)
    assert status == Status.model_validate(json.loads((run / "status.json").read_text()))
    assert not list(run.glob(".status*")), "a draft was left"
    return status


def test_a_run_that_is_stopped_done_and_refused(tmp_path, monkeypatch, capsys):
    """What happens on real ranks under torchrun is in test_tools.py."""
    write_corpus(tmp_path / "text")
    spec, run = write_spec(tmp_path), tmp_path / "run"
    ends = iter([(2, 75), (4, 0)])

    def train(spec, layout, status, **options):
        step, code = next(ends)
        with status.during(spec.checkpoint_path):
            assert found(run).state == "running"
            save_with_threads(spec.checkpoint_path, step, Topology())
            (run / "log.jsonl").write_text(
                json.dumps({"event": RunStopped.name, "time": 1.0, "step": step}) + "\n"
            )
        status.end(code)
        return code

    monkeypatch.setattr("pretrain.train.run", train)
    assert pretrain([str(spec)]) == 75
    status = found(run)
    assert (status.state, status.exit_code, status.world_size) == ("try_again", 75, 1)
    assert status.step == 2
    assert status.checkpoint == str(run / "checkpoints/manifests/step-00000002.json")
    capsys.readouterr()  # of the preparation
    assert main("status", [str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("try_again, exit code 75: stopped on request; the same command resumes\n")
    assert f"checkpoint  {status.checkpoint}" in out

    assert pretrain([str(spec)]) == 0
    status = found(run)
    assert (status.state, status.exit_code, status.step) == ("done", 0, 4)
    assert status.host == socket.gethostname()
    assert status.started <= status.time
    capsys.readouterr()
    assert main("status", [str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["gone"] is False
    assert shown["exit_code"] == 0
    # Refused before any rank acts; what the run had before is still told.
    assert pretrain([str(spec), "--set", "parallel.ep=3"]) == 2
    status = found(run)
    assert (status.state, status.exit_code) == ("bad_input", 2)
    assert "parallel.ep (3)" in status.reason
    assert status.step == 4


def test_a_refused_spec_is_recorded_where_its_file_says(tmp_path, monkeypatch, capsys):
    spec = write_spec(tmp_path)
    assert pretrain([str(spec), "--set", "train.stepz=3"]) == 2
    assert "stepz" in found(tmp_path / "run").reason
    monkeypatch.chdir(tmp_path)
    Path("named.toml").write_text('name = "one"\n')
    assert pretrain(["named.toml"]) == 2
    assert found(tmp_path / "runs/one").state == "bad_input"
    assert pretrain(["named.toml", "--set", "run_dir=there"]) == 2
    assert found(tmp_path / "there").state == "bad_input"
    monkeypatch.setenv("RANK", "1")
    assert pretrain(["named.toml", "--set", "run_dir=other"]) == 2
    assert not (tmp_path / "other").exists(), "only rank 0 writes"
    monkeypatch.delenv("RANK")
    for wrong in ("name = 3", "[[", 'name = "../up"'):
        Path("wrong.toml").write_text(wrong)
        assert pretrain(["wrong.toml"]) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "named.toml", "run", "runs", "spec.json", "there", "wrong.toml",
    ]  # fmt: skip
    capsys.readouterr()


def test_another_run_in_the_folder_keeps_its_status(text, tmp_path, capsys):
    spec = write_spec(tmp_path, data=data_of(text))
    run = tmp_path / "run"
    with lock_folder(run, "run_dir"), StatusFile(run).during(run / "checkpoints"):
        before = found(run)
        assert before.state == "running"
        assert pretrain([str(spec), "--set", "train.stepz=3"]) == 2
        code, _, err = launch(spec, 1)
        assert code == 2
        assert "is in use by another run" in err
        assert found(run) == before
    capsys.readouterr()


def test_a_crash_is_recorded_and_raised(tmp_path, monkeypatch):
    def crash(spec, layout, status, **options):
        with status.during(spec.checkpoint_path):
            assert found(tmp_path / "run").state == "running"
            raise ZeroDivisionError("a defect")

    write_corpus(tmp_path / "text")
    monkeypatch.setattr("pretrain.train.run", crash)
    with pytest.raises(ZeroDivisionError):
        pretrain([str(write_spec(tmp_path))])
    status = found(tmp_path / "run")
    assert (status.state, status.exit_code) == ("crashed", 1)
    assert status.reason == "ZeroDivisionError: a defect"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    status = StatusFile(blocked / "run")
    with status.during("s3://bucket/run"):
        pass
    status.end(0)
    assert blocked.read_text() == ""


ENDS = [
    (LostRankError("all_to_all"), ("lost_rank", 1)),
    (HealthError("diverged"), ("health", 3)),
    (InputError("train.steps"), ("bad_input", 2)),
    (CheckpointError("damaged"), ("bad_input", 2)),
    (KeyboardInterrupt(), ("interrupted", 130)),
    (SystemExit(2), ("bad_input", 2)),
    (SystemExit(1), ("lost_rank", 1)),
    (MemoryError(), ("crashed", 1)),
]


@pytest.mark.parametrize(("error", "expected"), ENDS, ids=lambda value: type(value).__name__)
def test_each_end_has_its_name_code_and_reason(error, expected):
    state, code, reason = outcome_of(error)
    assert (state, code) == expected
    assert reason
    assert "\n" not in reason


def test_a_run_that_was_killed_says_so(tmp_path, capsys):
    code = (
        "import sys, os, signal; from pathlib import Path\n"
        "from pretrain.observe import StatusFile\n"
        "with StatusFile(Path(sys.argv[1]), 4).during(Path(sys.argv[1], 'checkpoints')):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, timeout=60)
    assert found(tmp_path).is_gone
    (tmp_path / "log.jsonl").write_text('{"event": "stopped", "time": 1.0, "step": 41}\nhalf a li')
    assert main("status", [str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("killed: process ")
    assert "step        41" in out
    alive = found(tmp_path).model_copy(update={"pid": os.getpid()})
    (tmp_path / "status.json").write_text(alive.model_dump_json())
    assert not found(tmp_path).is_gone
    assert main("status", [str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"running: process {os.getpid()} on ")
    elsewhere = alive.model_copy(update={"host": "elsewhere", "pid": 2**22 + 1})
    assert not elsewhere.is_gone, "nobody can tell from here"


def test_no_status_ends_with_2(tmp_path, capsys):
    for folder, message in [
        (tmp_path / "nowhere", "does not exist"),
        (tmp_path, "has no status.json: no run has begun there"),
    ]:
        assert main("status", [str(folder)]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "status.json").write_text('{"state": "asleep"}')
    assert main("status", [str(tmp_path)]) == 2
    assert "is no status of a run" in capsys.readouterr().err


def test_the_last_step_of_a_log(tmp_path):
    log = tmp_path / "log.jsonl"
    assert last_step(log) is None
    log.write_text("")
    assert last_step(log) is None
    stop = {"event": RunStopped.name, "time": 1.0, "step": 7}
    events = [stop, {"event": "x"}, {**stop, "step": None}, 3, None]
    log.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "st')
    assert last_step(log) == 7
