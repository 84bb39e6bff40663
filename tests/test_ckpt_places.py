"""Bad places and bad company: disks that are full or fail, clocks that go back, saves and removals
at once. What was there stays, and what comes is whole or is an error."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckpt
from ckpt.files import Files
from parallel.layout import Topology
from pretrain.errors import InputError
from pretrain.runtime import lock_folder
from tests.checkpoints import (
    bits,
    full_values,
    info,
    local_array,
    memory_folder,
    pieces,
    save_with_threads,
)
from tests.crash import UnsyncedFiles
from tests.dist import run_ranks

ROOT = Path(__file__).parent.parent
TWO = Topology(dp_shard=2, ep=2)
SPECS = [
    ckpt.ArraySpec("model/w", (7, 3), torch.float32, (("fsdp",), ())),
    ckpt.ArraySpec("model/layers/e", (1, 4, 2, 2), torch.bfloat16, ((), ("ep",), ("efsdp",), ())),
]


@pytest.fixture
def root() -> Iterator[Path]:
    with memory_folder() as folder:
        yield Path(folder) / "a run's checkpoints, ünïcode"


def save(store: ckpt.Location, step: int, topology: Topology = TWO, **more: Any) -> ckpt.Manifest:
    return save_with_threads(store, step, topology, SPECS, step, **more)


def assert_whole(store: ckpt.Location, step: int, seed: int | None = None) -> None:
    manifest = ckpt.read_manifest(store, step)
    ckpt.verify(store, manifest)
    arrays = [local_array(spec, Topology(), 0) for spec in SPECS]
    ckpt.load(store, manifest, arrays)
    for array in arrays:
        expected = full_values(array.spec, step if seed is None else seed)
        assert torch.equal(bits(pieces(array)), bits(expected)), step


def assert_nothing_left_over(root: Path) -> None:
    steps = ckpt.committed_steps(root)
    kept = {ckpt.read_manifest(root, step).save_id for step in steps}
    assert {path.name for path in (root / "objects").iterdir()} == kept
    assert len(list((root / "manifests").iterdir())) == len(steps)


# Places that fail.

OPERATIONS = [name for name in vars(Files) if not name.startswith("_") and name != "close"]
ADDS = {"make_folder", "create", "append", "sync", "sync_folder", "link"}


class FailingFiles(UnsyncedFiles):
    """Fails the ``at``-th operation of those in ``which``, and those after it where ``for_good``;
    an append is done in half."""

    def __init__(self, number: int, at: int | None, for_good: bool, which: set[str]) -> None:
        self.number, self.at, self.for_good, self.which = number, at, for_good, which
        self.count = 0
        self._lock = threading.Lock()

    def __getattribute__(self, name: str) -> Any:
        real = super().__getattribute__(name)
        if name not in OPERATIONS or name not in self.which:
            return real
        with self._lock:
            count, self.count = self.count, self.count + 1
        bad = self.at is not None and (count == self.at or (self.for_good and count > self.at))
        if not bad:
            return real

        def fail(*arguments: Any) -> None:
            if name == "append":
                real(arguments[0], arguments[1][: len(arguments[1]) // 2])
            path = next((str(a) for a in arguments if isinstance(a, Path)), None)
            raise OSError(self.number, os.strerror(self.number), path)

        return fail


FAILURES = [
    (errno.ENOSPC, True, ADDS),
    (errno.ENOSPC, False, ADDS),
    (errno.EIO, True, set(OPERATIONS)),
    (errno.EIO, False, set(OPERATIONS)),
    (errno.EROFS, True, set(OPERATIONS) - {"sync", "sync_folder"}),
    (errno.EDQUOT, True, ADDS),
]


def fail_at(root: Path, files: FailingFiles) -> None:
    """A save over another, and what must be so whatever it meets."""
    shutil.rmtree(root, ignore_errors=True)
    store = ckpt.LocalStore(root, UnsyncedFiles())
    save(store, 1)
    refusal = ""
    try:
        save(ckpt.LocalStore(root, files), 2)
    except ckpt.CheckpointError as error:
        refusal = str(error)
    if refusal:
        assert os.strerror(files.number) in refusal
        assert "step 2" in refusal
        assert "\n" not in refusal
    steps = ckpt.committed_steps(store)
    assert steps == [1, 2] or (refusal and steps == [1])
    for step in steps:
        assert_whole(store, step)
    ckpt.remove_uncommitted(store)
    assert ckpt.committed_steps(store) == steps
    assert_nothing_left_over(root)
    save(store, 3)
    for step in [*steps, 3]:
        assert_whole(store, step)


@pytest.mark.parametrize(("number", "for_good", "which"), FAILURES)
def test_a_failure_at_some_operations_of_a_save(root, number, for_good, which):
    counting = FailingFiles(number, None, for_good, which)
    fail_at(root, counting)
    assert counting.count > 40
    for at in range(number % 7, counting.count, 7):
        fail_at(root, FailingFiles(number, at, for_good, which))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "for_good", "which"), FAILURES)
def test_a_failure_at_every_operation_of_a_save(root, number, for_good, which):
    files, at = FailingFiles(number, 0, for_good, which), 0
    while files.count >= at:  # it was reached
        files = FailingFiles(number, at, for_good, which)
        fail_at(root, files)
        at += 1
    assert at > 40


@pytest.mark.parametrize(("number", "for_good", "which"), FAILURES)
def test_a_failure_at_every_operation_of_a_retention_pass(root, number, for_good, which):
    if number in (errno.ENOSPC, errno.EDQUOT):
        which = which - {"sync_folder"}  # with the mark it might cost a leftover
    at, files = 0, None
    while files is None or files.count > files.at:
        shutil.rmtree(root, ignore_errors=True)
        files = FailingFiles(number, at, for_good, which)
        store = ckpt.LocalStore(root, UnsyncedFiles())
        for step in (1, 2, 3):
            save(store, step, Topology())
        with contextlib.suppress(OSError):
            ckpt.retain(ckpt.LocalStore(root, files), 1)
        steps = ckpt.committed_steps(store)
        assert steps[-1] == 3
        for step in steps:
            assert_whole(store, step)
        ckpt.remove_uncommitted(store)
        ckpt.retain(store, 1)
        assert ckpt.committed_steps(store) == [3]
        assert_nothing_left_over(root)
        assert_whole(store, 3)
        at += 1
    assert at > 3


def test_room_is_made_on_a_full_disk(root):
    # The mark that a removal leaves first needs room itself.
    store = ckpt.LocalStore(root, UnsyncedFiles())
    for step in (1, 2, 3):
        save(store, step, Topology())
    full = ckpt.LocalStore(root, FailingFiles(errno.ENOSPC, 0, True, {"make_folder", "create"}))
    assert ckpt.retain(full, 1) == [1, 2]
    assert_nothing_left_over(root)
    assert_whole(store, 3)


def test_what_cannot_be_removed_now_is_removed_later(root):
    # A network file system keeps the files that somebody has open, under other names.
    store = ckpt.LocalStore(root, UnsyncedFiles())
    for step in (1, 2):
        save(store, step, Topology())

    class Busy(UnsyncedFiles):
        def remove(self, path: Path) -> None:
            if path.name == "0" and "objects" in path.parts:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            super().remove(path)

    assert ckpt.retain(ckpt.LocalStore(root, Busy()), 1) == [1]
    assert len(list((root / "objects").iterdir())) == 3, "what is left must stay marked"
    assert ckpt.remove_uncommitted(store) == ["00000001-test"]
    assert_nothing_left_over(root)


def test_a_failing_save_leaves_another_step_of_the_same_save_id(root):
    store = ckpt.LocalStore(root, UnsyncedFiles())
    save(store, 1, save_id="twice")
    with pytest.raises(ckpt.CheckpointError, match=r"step 2 .* is not saved: File exists"):
        save(store, 2, save_id="twice")
    assert_whole(store, 1)


def test_a_commit_that_cannot_be_read_back_keeps_its_objects(root):
    # The manifest is there, its folder cannot be synced, and then it cannot be read either.
    class Failing(UnsyncedFiles):
        linked = False

        def link(self, old: Path, new: Path) -> None:
            super().link(old, new)
            self.linked = new.parent.name == "manifests"

        def sync_folder(self, path: Path) -> None:
            if self.linked:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    class Blind(ckpt.LocalStore):
        def open(self, key: str) -> Any:
            if self.files.linked and "manifests" in key:
                raise OSError(errno.EIO, os.strerror(errno.EIO), key)
            return super().open(key)

    with pytest.raises(ckpt.CheckpointError, match="Input/output error"):
        save(Blind(root, Failing()), 1)
    assert_whole(root, 1)


def test_a_folder_that_may_only_be_read(root, tmp_path):
    if shutil.which("mount") is None:
        pytest.skip("no mount command")
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        save(tmp_path, 1)
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(ckpt.CheckpointError, match=r"step 2 .*: Read-only file system"):
            save(tmp_path, 2)
        assert_whole(tmp_path, 1)
        assert ckpt.remove_uncommitted(tmp_path) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


class FailingReads(ckpt.LocalStore):
    """Fails the ``at``-th look: at a folder, or at some bytes of an object."""

    def __init__(self, root: Path, at: int) -> None:
        super().__init__(root)
        self.at, self.count = at, 0
        self._lock = threading.Lock()

    def look(self, key: str) -> None:
        with self._lock:
            self.count += 1
            if self.count == self.at + 1:
                raise OSError(errno.EIO, os.strerror(errno.EIO), key)

    def names(self, folder: str) -> list[str]:
        self.look(folder)
        return super().names(folder)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Any]:
        self.look(key)
        with super().open(key) as reader:
            store, size = self, reader.size

            class Reader:
                def __init__(self) -> None:
                    self.size = size

                def read_into(self, start: int, parts: list[np.ndarray]) -> None:
                    store.look(key)
                    reader.read_into(start, parts)

                def expect(self, spans: list[tuple[int, int]]) -> None:
                    store.look(key)

            yield Reader()


def test_a_failure_at_every_read_names_what_could_not_be_read(root):
    save(root, 1)
    counting = FailingReads(root, 10**9)
    assert_whole(counting, 1)
    looks = counting.count
    for at in range(looks + 1):
        store = FailingReads(root, at)
        if at < looks:
            with pytest.raises(ckpt.CheckpointError, match="cannot be read: Input/output") as error:
                assert_whole(store, 1)
            assert str(root) in str(error.value)
        else:
            assert_whole(store, 1)
    assert looks > 40
    assert_whole(root, 1)


# Company.


class Meeting(UnsyncedFiles):
    """Publishes a manifest only when somebody else is about to as well."""

    barrier = threading.Barrier(2)

    def link(self, old: Path, new: Path) -> None:
        if new.parent.name == "manifests":
            self.barrier.wait(60)
        super().link(old, new)


def save_alone(root: Path, step: int, save_id: str, seed: int, files: Files | None = None) -> str:
    """As one process; the error, or nothing."""
    arrays = [local_array(s, Topology(), 0, full_values(s, seed)) for s in SPECS]
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
    done = threading.Event()

    def keep_removing() -> int:
        passes = 0
        while not done.is_set():
            ckpt.retain(ckpt.LocalStore(root, UnsyncedFiles()), 2)
            passes += 1
        return passes

    with ThreadPoolExecutor(1) as pool:
        passes = pool.submit(keep_removing)
        try:
            for step in range(1, 31):
                assert save_alone(root, step, f"{step}-x", step, UnsyncedFiles()) == ""
                steps = ckpt.committed_steps(root)
                assert steps[-1] == step
                assert_whole(root, step)
        finally:
            done.set()
        assert passes.result() > 5
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

    monkeypatch.setattr("ckpt.saving.datetime", Clock)
    for step in (1, 2, 3, 4):
        save(root, step)
        for path in root.rglob("*"):
            os.utime(path, (Clock.now_is - step * 10**6,) * 2)
    created = [ckpt.read_manifest(root, step).created for step in (1, 2, 3, 4)]
    assert created == sorted(created, reverse=True)
    assert ckpt.read_manifest(root).step == 4
    assert ckpt.retain(root, 2) == [1, 2]
    assert ckpt.remove_uncommitted(root) == []
    for step in (3, 4):
        assert_whole(root, step)
    assert_nothing_left_over(root)


HOLDER = """
import sys, time
from pathlib import Path
from pretrain.runtime import lock_folder
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
