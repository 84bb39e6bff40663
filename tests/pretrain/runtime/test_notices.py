"""Runs that stop by themselves: a preemption notice file, and a time limit."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from convoy.commands.pretrain import main
from pretrain.observe import CheckpointCommitted, Events, SaveBegun
from pretrain.observe.jsonl import LoggedEvent
from pretrain.runtime import (
    StopCause,
    StopRequest,
    end_torchrun,
    starts_again_without_machine,
    stop_torchrun,
)
from pretrain.runtime.notices import NoticeFile, TimeLimit, must_stop, slurm_end
from pretrain.runtime.start_parts import StartParts, process_start
from pretrain.train.notices import note_save, watch_notices
from pretrain.train.trainer import Trainer
from tests.support.checkpoints import eventually
from tests.support.jobs import data_of, events, prepare_job, write_spec
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return prepare_job(tmp_path_factory.mktemp("job"))


# ------------------------------------------------------------------------------------------------
# The notice file.


@pytest.fixture
def notice_file():
    made = []

    def make(path: Path, since: float) -> NoticeFile:
        made.append(NoticeFile(path, since=since, poll_seconds=0.01))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_file_that_appears_is_a_notice(tmp_path, notice_file):
    path = tmp_path / "preempted"
    watched = notice_file(path, time.time())
    assert not watched.seen
    path.touch()
    eventually(lambda: watched.seen, "the file is not seen")
    path.unlink()
    assert watched.seen, "a notice is not taken back"


def test_a_file_of_before_the_start_is_no_notice_until_it_is_touched(tmp_path, notice_file):
    path = tmp_path / "preempted"
    path.touch()
    began = time.time()
    os.utime(path, (began - 60, began - 60))
    old = notice_file(path, began)
    written_in_the_start = notice_file(path, began - 120)
    assert old.is_old
    assert not written_in_the_start.is_old
    eventually(lambda: written_in_the_start.seen, "the file is not seen")
    assert not old.seen
    os.utime(path, (began + 1, began + 1))
    eventually(lambda: old.seen, "the file is not seen")


def test_a_notice_file_that_cannot_be_looked_at_is_none(tmp_path, notice_file):
    (tmp_path / "file").touch()
    watched = notice_file(tmp_path / "file" / "below", 0.0)
    watched.close()
    assert not watched.seen


# ------------------------------------------------------------------------------------------------
# The time limit, on a clock of its own.


@pytest.mark.parametrize(
    ("deadline", "step", "save", "stops"),
    [
        (100.0, 10.0, 20.0, False),
        (55.1, 10.0, 20.0, False),  # 1.25 x (10 + 10 + 20) + 5 = 55
        (54.9, 10.0, 20.0, True),
        (54.9, 10.0, 19.0, False),
        (54.9, 9.0, 20.0, False),
        (4.9, 0.0, 0.0, True),
        (-10.0, 0.0, 0.0, True),
    ],
)
def test_the_last_step_leaves_time_for_one_more_and_a_save(deadline, step, save, stops):
    assert must_stop(0.0, deadline, step_seconds=step, save_seconds=save) is stops
    moved = must_stop(1e9, 1e9 + deadline, step_seconds=step, save_seconds=save)
    assert moved is stops


@settings(max_examples=80, deadline=None)
@given(
    steps=st.integers(15, 200),
    warm_up=st.floats(0.1, 50.0),
    step=st.floats(0.01, 20.0),
    stall=st.floats(0.0, 3.0),
    commit=st.floats(0.1, 30.0),
    noise=st.lists(st.floats(0.95, 1.05), min_size=1, max_size=20),
)
def test_a_run_ends_before_its_limit_and_not_long_before(
    steps, warm_up, step, stall, commit, noise
):
    """A save is begun after every fourth step, and is committed while later steps run."""
    clock, taken = [warm_up], 0
    limit = 5 * warm_up + steps * step + 12 * (stall + commit) + 10
    measured = TimeLimit(limit, seconds=limit, now=lambda: clock[0])
    written_at = 0.0

    def save() -> None:
        nonlocal written_at
        clock[0] = max(clock[0], written_at) + stall  # a save waits for the one before
        measured.note_stall(stall)
        written_at = clock[0] + commit
        measured.note_commit(commit)

    stop = False
    while not stop:
        stop = measured.begin_step()
        clock[0] += step * noise[taken % len(noise)] + (warm_up if taken == 0 else 0.0)
        taken += 1
        if taken % 4 == 1 and not stop:
            save()
    at_stop = clock[0]
    save()
    assert taken > 3, "the limit leaves time for saves to be measured"
    assert written_at < limit
    slowest = 1.05 * step + stall + commit
    assert limit - at_stop < 1.25 * (2 * slowest + 2 * (stall + commit)) + 5.01


def test_a_first_save_has_a_share_of_the_limit():
    assert TimeLimit(1_000.0, seconds=100.0).save_seconds == 10.0
    assert TimeLimit(1e6, seconds=1e6).save_seconds == 60.0
    assert TimeLimit(5.0, seconds=-5.0).save_seconds == 0.0


def test_saves_are_measured_where_the_run_is_resumed_from():
    limit = TimeLimit(1e6, seconds=1e6)
    shared = {"tier": "shared", "write_seconds": 1.0}
    note_save(limit, SaveBegun(step=1, stall_seconds=2.0, tiers=["memory", "shared"]))
    assert limit.save_seconds == 60.0, "nothing is committed"
    note_save(limit, CheckpointCommitted(step=1, seconds=7.0, **shared))
    assert limit.save_seconds == 2 * (2.0 + 7.0)
    note_save(limit, SaveBegun(step=2, stall_seconds=99.0, tiers=["memory"]))
    note_save(limit, CheckpointCommitted(step=2, tier="memory", seconds=99.0, write_seconds=1.0))
    assert limit.save_seconds == 18.0, "the run ends with a save to the shared tier"
    for step in range(20):
        note_save(limit, SaveBegun(step=step, stall_seconds=1.0, tiers=["shared"]))
        note_save(limit, CheckpointCommitted(step=step, seconds=3.0, **shared))
    assert limit.save_seconds == 8.0, "what is long ago is forgotten"


def watched(
    monkeypatch, *, slurm: str | None, limit: float | None, began: float, jump: float = 0.0
):
    """What rank 0 is told, and the cause at its first two steps. The wall clock jumps before."""
    if slurm is None:
        monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    else:
        monkeypatch.setenv("SLURM_JOB_END_TIME", slurm)
    monkeypatch.delenv("CONVOY_NOTICE_FILE", raising=False)
    told = []
    parts = SimpleNamespace(began=began, age=time.time() - began)
    runtime = SimpleNamespace(rank=0, is_first=True, ranks_per_node=1, start_parts=parts)
    events = Events(lambda event: told.append(event.text))
    stop = StopRequest()
    try:
        save = CheckpointCommitted(step=1, tier="shared", seconds=1000.0, write_seconds=1.0)
        with contextlib.ExitStack() as until:
            watch_notices(
                runtime, events, stop, limit_seconds=limit, former=[LoggedEvent(save, 1.0)],
                until=until,
            )  # fmt: skip
        with monkeypatch.context() as patch:
            wall = time.time
            patch.setattr(time, "time", lambda: wall() + jump)
            return told, [stop.cause, stop.cause]
    finally:
        stop.restore()


def test_the_earlier_limit_counts_and_a_limit_that_has_passed_is_told(monkeypatch):
    now = time.time()
    far, near = str(int(now) + 10_000), str(int(now) + 1_000)
    never, always = [StopCause.NONE] * 2, [StopCause.TIME_LIMIT] * 2
    told, causes = watched(monkeypatch, slurm=None, limit=None, began=now)
    assert (told, causes) == ([], never)
    told, causes = watched(monkeypatch, slurm=far, limit=20_000.0, began=now)
    assert (told, causes) == ([], never)
    told, causes = watched(monkeypatch, slurm=near, limit=20_000.0, began=now)
    assert causes == always
    told, causes = watched(monkeypatch, slurm=far, limit=20.0, began=now - 3600)
    assert causes == always
    (line,) = told
    assert line.startswith("the time limit is -35")
    assert "one step is taken and saved; raise train.time_limit_seconds" in line
    told, causes = watched(monkeypatch, slurm="1700000000", limit=None, began=now)
    assert causes == never
    assert told == ["SLURM_JOB_END_TIME (1700000000) has passed: the run takes it for no limit"]
    told, causes = watched(monkeypatch, slurm="soon", limit=None, began=now)
    assert (told, causes) == ([], never)


@pytest.mark.parametrize("jump", [5 * 3600.0, -5 * 3600.0])
def test_a_wall_clock_that_jumps_changes_no_part_of_a_start(monkeypatch, jump):
    parts, wall = StartParts(), time.time
    parts.mark("imports")
    monkeypatch.setattr(time, "time", lambda: wall() + jump)
    parts.mark("build")
    age = time.clock_gettime(time.CLOCK_BOOTTIME)  # the machine is older than the process
    assert 0.0 <= parts.seconds["build"] < parts.age < age


@pytest.mark.parametrize("jump", [5 * 3600.0, -5 * 3600.0])
def test_a_wall_clock_that_jumps_moves_no_limit(monkeypatch, jump):
    now = time.time()
    for slurm in (None, str(int(now) + 15_000)):
        _, causes = watched(monkeypatch, slurm=slurm, limit=15_000.0, began=now, jump=jump)
        assert causes == [StopCause.NONE] * 2
    _, causes = watched(monkeypatch, slurm=None, limit=20.0, began=now - 3600, jump=jump)
    assert causes == [StopCause.TIME_LIMIT] * 2


@pytest.mark.parametrize("text", ["", "x", "-5", "1e9", "١٢"])
def test_an_end_of_slurm_that_is_no_number_is_none(text):
    assert slurm_end({"SLURM_JOB_END_TIME": text}) is None
    assert slurm_end({}) is None
    assert slurm_end({"SLURM_JOB_END_TIME": "1700000000"}) == 1.7e9


def test_the_start_of_the_process_and_its_parts():
    began = process_start()
    assert abs(process_start() - began) < 0.05, "the same at every call"
    assert began < time.time()
    before = time.time()
    parts = StartParts()
    parts.mark("imports")
    parts.mark("build")
    parts.mark("imports")
    after = time.time()
    assert list(parts.seconds) == ["imports", "build"]
    spent = sum(parts.seconds.values())
    assert before - parts.began - 0.01 <= spent <= after - parts.began + 0.01


@pytest.mark.parametrize(
    ("environment", "parent", "told"),
    [
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "2"}, 77, True),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RESTART_COUNT": "3"}, 77, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "3", "LOCAL_RANK": "1"}, 77, False),
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, 78, False),  # it is gone, and another is the parent
        ({"TORCHELASTIC_MAX_RESTARTS": "3"}, None, False),
        ({}, 77, False),
    ],
)
def test_torchrun_ends_where_it_would_start_the_ranks_again(monkeypatch, environment, parent, told):
    sent = []
    for name in ("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RESTART_COUNT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "getppid", lambda: 77)
    monkeypatch.setattr(os, "kill", lambda *arguments: sent.append(arguments))
    stop_torchrun(parent)
    assert sent == ([(77, signal.SIGTERM)] if told else [])
    sent.clear()
    for code in (0, 1, 75):
        end_torchrun(parent, code)
    assert sent == []
    any_rank = told or (parent == 77 and "LOCAL_RANK" in environment)
    for code in (2, 3):
        sent.clear()
        end_torchrun(parent, code)
        assert sent == ([(77, signal.SIGTERM)] if any_rank else []), code


# ------------------------------------------------------------------------------------------------
# Both, on two real ranks.


def on_rank(
    rank: int, arguments: list[str], notice: str, write_at: int
) -> tuple[int, str, list[int]]:
    """The command on a rank that is a machine of its own; rank 1's machine gets a notice file."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    if notice and rank == 1:
        os.environ["CONVOY_NOTICE_FILE"] = notice
        step = Trainer.step

        def step_with_notice(self, stop_requested):
            if self.progress.step == write_at - 1:
                Path(notice).touch()
            return step(self, stop_requested)

        Trainer.step = step_with_notice
    causes = []
    train = Trainer.train

    def train_and_tell(self, stop):
        stopped = train(self, stop)
        causes.append(int(self.stop_cause))
        return stopped

    Trainer.train = train_and_tell
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(arguments)
    return code, out.getvalue(), causes


def test_the_notice_of_one_rank_stops_all_ranks_with_a_checkpoint(text, tmp_path):
    spec = write_spec(
        tmp_path, data=data_of(text), parallel={"ep": 2}, train={"steps": 1_000_000},
        checkpoint={"interval_steps": 1_000_000},
    )  # fmt: skip
    run, notice = tmp_path / "run", tmp_path / "preempted"

    # A limit that has passed before the first step: the start takes one step all the same.
    limited = [str(spec), "--set", "train.time_limit_seconds=0.01"]
    results = run_ranks(on_rank, 2, limited, "", 0, group=False)
    assert [code for code, _, _ in results] == [75, 75]
    assert [causes for _, _, causes in results] == [[StopCause.TIME_LIMIT]] * 2
    out = results[0][1]
    assert "one step is taken and saved; raise train.time_limit_seconds" in out
    assert "stopped after step 1 before the time limit; the same command" in out
    assert ckpt.committed_steps(run / "checkpoints") == [1]

    results = run_ranks(on_rank, 2, [str(spec)], str(notice), 5, group=False)
    assert [code for code, _, _ in results] == [75, 75]
    assert [causes for _, _, causes in results] == [[StopCause.NOTICE_FILE]] * 2
    stopped = events(run, "stopped")
    assert [each["cause"] for each in stopped] == ["time_limit", "notice_file"]
    assert stopped[-1]["step"] >= 5
    steps = [each["step"] for each in events(run, "step")]
    assert steps == list(range(1, stopped[-1]["step"] + 1)), "no step is taken twice"
    assert ckpt.committed_steps(run / "checkpoints")[-1] == steps[-1]
    ckpt.verify(run / "checkpoints", ckpt.read_manifest(run / "checkpoints"))
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("try_again", 75)
    assert status["reason"] == "stopped on a preemption notice; the same command resumes"
    assert status["ledger"]["restarts"] == {"stopped": 1}


@pytest.mark.slow
def test_torchrun_with_restarts_does_not_start_a_run_again_that_got_a_notice(text, tmp_path):
    spec = write_spec(
        tmp_path, data=data_of(text), checkpoint={"interval_steps": 1_000_000},
        train={"steps": 1_000_000},
    )  # fmt: skip
    root, run = Path(__file__).parents[3], tmp_path / "run"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--max-restarts", "3", "tools/pretrain.py", str(spec),
    ]  # fmt: skip
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "CONVOY_NOTICE_FILE": str(tmp_path / "preempted"),
    }  # fmt: skip
    with subprocess.Popen(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True,
    ) as process:  # fmt: skip
        try:
            while not (run / "log.jsonl").exists() or len(events(run, "step")) < 3:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.05)
            (tmp_path / "preempted").touch()
            out = process.communicate(timeout=200)[0]
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    assert "on a preemption notice; the same command resumes" in out
    assert len(events(run, "launch")) == 1, "the ranks were started again"
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("try_again", 75)


@pytest.mark.parametrize(
    ("words", "left", "expected"),
    [
        (["--nnodes=1:2", "--rdzv-backend=convoy"], 1, True),
        (["--nnodes", "2:4", "--rdzv_backend", "convoy"], 2, True),
        (["--nnodes=2:4", "--rdzv-backend=convoy"], 1, False),
        (["--nnodes=1:2", "--rdzv-backend=c10d"], 1, False),
        (["--standalone"], 1, False),
    ],
)
def test_a_launch_without_a_machine(words, left, expected, monkeypatch):
    """Read from the command line of torchrun, here a process that sleeps."""
    program = "import time; print(flush=True); time.sleep(60)"
    sleeper = [sys.executable, "-c", program, *words]
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with subprocess.Popen(sleeper, stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()  # until then the process is a copy of this one
            monkeypatch.setenv("CONVOY_TORCHRUN_PID", str(process.pid))
            assert starts_again_without_machine(left) == expected
            monkeypatch.setenv("SLURM_JOB_ID", "17")  # Slurm gives another machine
            assert starts_again_without_machine(left) == (expected or "convoy" in str(words))
        finally:
            process.kill()
    monkeypatch.delenv("CONVOY_TORCHRUN_PID")
    assert not starts_again_without_machine(5)
