"""Several at one folder: saves of the same step and of others, saves and removals; a clock that
goes back, a lock whose holder was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.store.posix import Files
from parallel.layout import Topology
from pretrain.errors import InputError
from pretrain.runtime.locks import lock_folder
from tests.support.checkpoints import (
    SMALL_SPECS,
    assert_nothing_left_over,
    assert_whole,
    full_values,
    info,
    local_array,
)
from tests.support.checkpoints import save_small as save
from tests.support.crash import UnsyncedFiles
from tests.support.ranks import run_ranks

ROOT = Path(__file__).parents[2]


class Meeting(UnsyncedFiles):
    """Publishes a manifest only when somebody else is about to as well."""

    barrier = threading.Barrier(2)

    def link(self, old: Path, new: Path) -> None:
        if new.parent.name == "manifests":
            self.barrier.wait(60)
        super().link(old, new)


def save_alone(root: Path, step: int, save_id: str, seed: int, files: Files | None = None) -> str:
    """As one process; the error, or nothing."""
    arrays = [local_array(s, Topology(), 0, full_values(s, seed)) for s in SMALL_SPECS]
    try:
        store = ckpt.LocalStore(root, files)
        ckpt.save(store, info(step, Topology(), save_id), arrays, 0, lambda ok: ok)
    except ckpt.CheckpointError as error:
        return str(error)
    return ""


def assert_one_won(root: Path, step: int, errors: list[str]) -> None:
    assert sum(not error for error in errors) == 1, errors
    lost = next(error for error in errors if error)
    assert f"step {step} already has a checkpoint" in lost
    winner = errors.index("")
    assert ckpt.read_manifest(root, step).save_id == f"{step}-{winner}"
    assert_whole(root, step, seed=winner)
    assert_nothing_left_over(root)


def test_of_two_saves_that_publish_one_step_at_once_one_wins(root):
    with ThreadPoolExecutor(2) as pool:
        saves = [pool.submit(save_alone, root, 5, f"5-{i}", i, Meeting()) for i in (0, 1)]
        assert_one_won(root, 5, [each.result() for each in saves])


def test_two_saves_of_different_steps_at_once_are_both_whole(root):
    with ThreadPoolExecutor(2) as pool:
        saves = [pool.submit(save_alone, root, i, f"{i}-x", i, Meeting()) for i in (5, 6)]
        assert [each.result() for each in saves] == ["", ""]
    for step in (5, 6):
        assert_whole(root, step)
    assert_nothing_left_over(root)


class StartsAgain(UnsyncedFiles):
    """A later start removes what is uncommitted, before an operation of a save."""

    def __init__(self, root: Path, number: int) -> None:
        self.root, self.number, self.count = root, number, 0
        self._lock = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        if name in OPERATIONS:
            with self._lock:
                if self.count == self.number:
                    ckpt.lifecycle.remove_uncommitted(self.root)
                self.count += 1
        return super().__getattribute__(name)


OPERATIONS = {name for name in vars(Files) if not name.startswith("_")}


def test_a_later_start_that_cleans_up_during_a_save_leaves_no_half_of_it(tmp_path):
    number, refused = 0, 0
    while True:
        root = tmp_path / f"{number}"
        files = StartsAgain(root, number)
        error = save_alone(root, 5, "5-x", 5, files)
        steps = ckpt.committed_steps(root)
        assert steps == ([] if error else [5]), (number, error)
        for step in steps:
            assert_whole(root, step)
        ckpt.lifecycle.remove_uncommitted(root)
        assert_nothing_left_over(root)
        if files.count <= number:
            break
        number, refused = number + 1, refused + bool(error)
    assert number > 40
    assert refused > number / 3


def save_the_same_steps(rank: int, root: Path, count: int) -> list[str]:
    errors = []
    for step in range(count):
        torch.distributed.barrier()
        errors.append(save_alone(root, step, f"{step}-{rank}", rank))
    return errors


def test_two_processes_that_save_the_same_steps(tmp_path):
    errors = run_ranks(save_the_same_steps, 2, tmp_path, 5)
    for step, both in enumerate(zip(*errors, strict=True)):
        assert_one_won(tmp_path, step, list(both))


def test_saves_while_others_are_removed(root):
    done, passed = threading.Event(), threading.Semaphore(0)

    def keep_removing() -> None:
        while not done.is_set():
            ckpt.retain(ckpt.LocalStore(root, UnsyncedFiles()), 2)
            passed.release()

    with ThreadPoolExecutor(1) as pool:
        removing = pool.submit(keep_removing)
        try:
            for step in range(1, 31):
                assert save_alone(root, step, f"{step}-x", step, UnsyncedFiles()) == ""
                steps = ckpt.committed_steps(root)
                assert steps[-1] == step
                assert_whole(root, step)
                # However little time the other thread is given, it takes part all along.
                assert step % 5 or passed.acquire(timeout=60) or removing.result()
        finally:
            done.set()
        removing.result()
    ckpt.retain(root, 2)
    assert ckpt.committed_steps(root) == [29, 30]
    for step in (29, 30):
        assert_whole(root, step)
    assert_nothing_left_over(root)


def test_a_clock_that_goes_back_changes_nothing(root, monkeypatch):
    class Clock:
        now_is = 2_000_000_000

        @classmethod
        def now(cls, zone: Any) -> Any:
            cls.now_is -= 86_400
            return datetime.fromtimestamp(cls.now_is, zone)

    monkeypatch.setattr(import_module("ckpt.write.commit"), "datetime", Clock)
    for step in (1, 2, 3, 4):
        save(root, step)
        for path in root.rglob("*"):
            os.utime(path, (Clock.now_is - step * 10**6,) * 2)
    created = [ckpt.read_manifest(root, step).created for step in (1, 2, 3, 4)]
    assert created == sorted(created, reverse=True)
    assert ckpt.read_manifest(root).step == 4
    assert ckpt.retain(root, 2) == [1, 2]
    assert ckpt.lifecycle.remove_uncommitted(root) == []
    for step in (3, 4):
        assert_whole(root, step)
    assert_nothing_left_over(root)


HOLDER = """
import sys, time
from pathlib import Path
from pretrain.runtime.locks import lock_folder
with lock_folder(Path(sys.argv[1]), "run_dir"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_lock_does_not_outlive_its_holder(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            with (
                pytest.raises(InputError, match="in use by another run"),
                lock_folder(tmp_path, "x"),
            ):
                pass
        finally:
            holder.send_signal(signal.SIGKILL)
    assert (tmp_path / ".lock").exists(), "a stale file, that holds nobody up"
    with lock_folder(tmp_path, "x"):
        pass
