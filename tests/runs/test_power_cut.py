"""A cut of power at any operation of a preparation and of a run, as their system calls show it:
what is there is whole, and the work goes on from there.

Saves, retention, clean-ups and conversions are in tests/ckpt/test_crash.py.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt
from convoy.audit import audit_data
from convoy.commands.command_line import main
from corpus.config import DataConfig
from corpus.manifest import read_manifest
from corpus.prepare.prepare import prepare_corpus
from pretrain.data.verify import verify_corpus
from pretrain.errors import InputError
from pretrain.observe import JsonlLog, Notice, read_log
from pretrain.observe.status import read_status
from tests.ckpt.test_crash import crash_everywhere, without
from tests.support.checkpoints import memory_folder
from tests.support.crash import Operation, UnsyncedFiles
from tests.support.jobs import data_of, events, prepare_job, write_corpus, write_spec
from tests.support.traced import note, operations, trace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

ROOT = Path(__file__).parents[2]
MODULE = "tests.runs.test_power_cut"
STEPS = 6


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"
    }


def config(text: Path, disk: Path) -> DataConfig:
    return DataConfig(source=str(text), path=str(disk / "corpus"), seq_len=32, shard_tokens=4000)


def prepare(room: Path) -> None:
    prepare_corpus(config(room / "text", room / "disk"), 300, lambda _: None)
    note(room, "saved", 1)


def test_a_preparation_is_whole_or_not_there(tmp_path):
    write_corpus(tmp_path / "text", 6)
    disk = tmp_path / "disk"
    disk.mkdir()
    log = operations(trace(MODULE, "prepare", tmp_path), tmp_path, disk)
    calm = files_of(disk / "corpus")

    def survived(base: Path, saved: set[int], unwanted: set[int]) -> None:
        target = base / "corpus"
        assert target.exists() or not saved, "it was reported as done"
        if target.exists():
            verify_corpus(target, read_manifest(target))
            assert files_of(target) == calm
        prepare_corpus(config(tmp_path / "text", base), 300, lambda _: None)
        assert files_of(target) == calm, "the command goes on to other files"

    with memory_folder() as memory:
        room = Path(memory) / "disk"
        assert crash_everywhere(log, disk, 1, True, every=2, survived=survived, room=room) > 20
        with pytest.raises(Exception, match=r"."):  # tokenizers has no class of its own
            crash_everywhere(without("sync")(log), disk, 1, False, survived=survived, room=room)


def train(room: Path) -> None:
    code = main("pretrain", [str(room / "spec.json")])
    assert code == 0


def with_promises(log: list[Operation]) -> list[Operation]:
    """The operations, and after each manifest's durable link the word that its step is saved."""
    found, linked = list[Operation](), list[int]()
    for op in log:
        found.append(op)
        if op.kind == "link" and op.other.parent.name == "manifests":
            linked.append(int(op.other.stem.removeprefix("step-")))
        elif op.kind == "sync_folder" and op.path.name == "manifests":
            found += [Operation("saved", file=step) for step in linked]
            linked.clear()
    return found


def assert_can_be_read(run: Path) -> None:
    """A log that lost its end or has zeros in it, and a status of any age, are no riddle."""
    for read in (read_status, audit_data):
        said = ""
        try:
            read(run)
        except InputError as error:
            said = str(error)
        assert "\n" not in said
    if (run / "log.jsonl").exists():
        before = len(read_log(run / "log.jsonl").events)
        copy = run / "copy.jsonl"
        shutil.copy(run / "log.jsonl", copy)
        log = JsonlLog(copy)
        log(Notice(step=0, text="after the cut"))
        log.close()
        assert len(read_log(copy).events) == before + 1


def test_a_run_goes_on_after_a_cut_of_power(tmp_path):
    data = data_of(prepare_job(tmp_path / "job"))
    disk = tmp_path / "disk"
    disk.mkdir()
    sections = {
        "data": data, "train": {"steps": STEPS, "exact": True},
        "checkpoint": {"interval_steps": 2, "retention": {"keep": 9}},
    }  # fmt: skip
    write_spec(tmp_path, run_dir=str(disk / "run"), **sections)
    log = with_promises(operations(trace(MODULE, "train", tmp_path), tmp_path, disk))
    assert {op.file for op in log if op.kind == "saved"} == {2, 4, 6}
    expected = {event["step"]: event["loss"] for event in events(disk / "run", "step")}
    states = [0]

    def survived(base: Path, saved: set[int], unwanted: set[int]) -> None:
        root = base / "run" / "checkpoints"
        steps = ckpt.committed_steps(ckpt.LocalStore(root, UnsyncedFiles()))
        assert saved <= set(steps), f"saved {saved}, and there are {steps}"
        for step in steps:
            ckpt.verify(root, ckpt.read_manifest(root, step))
        assert_can_be_read(base / "run")
        states[0] += 1
        if states[0] % 40 == 0:
            goes_on(base)

    def goes_on(base: Path) -> None:
        spec = write_spec(base, run_dir=str(base / "run"), **sections)
        words = [sys.executable, "-m", "convoy", "pretrain", str(spec)]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        found = {e["step"]: e["loss"] for e in whole_lines(base / "run") if e["event"] == "step"}
        assert found == {step: expected[step] for step in found}
        assert max(found, default=STEPS) == STEPS

    with memory_folder() as memory:
        room = Path(memory) / "disk"
        crash_everywhere(log, disk, 1, False, every=7, survived=survived, room=room)
        assert states[0] > 60
        with pytest.raises((AssertionError, ValueError)):
            crash_everywhere(without("sync")(log), disk, 2, False, survived=survived, room=room)


def whole_lines(run: Path) -> list[dict[str, object]]:
    """The lines of a log that a cut of power may have torn."""
    found = []
    for line in (run / "log.jsonl").read_bytes().split(b"\n"):
        if line.startswith(b"{") and line.endswith(b"}") and b"\0" not in line:
            found.append(json.loads(line))
    return found
