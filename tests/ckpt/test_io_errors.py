"""Bad places: disks that are full or fail, at each operation and at each read. What was there
stays, and what comes is whole or is an error."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.store.posix import Files
from parallel.layout import Topology
from tests.support.checkpoints import (
    assert_nothing_left_over,
    assert_whole,
)
from tests.support.checkpoints import save_small as save
from tests.support.crash import UnsyncedFiles

ROOT = Path(__file__).parents[2]


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
    ckpt.lifecycle.remove_uncommitted(store)
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


@pytest.mark.parametrize(
    ("number", "for_good", "which"),
    [FAILURES[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in FAILURES[1:])],
)
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
        ckpt.lifecycle.remove_uncommitted(store)
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
            if path.name.startswith("c.") and "objects" in path.parts:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(path))
            super().remove(path)

    assert ckpt.retain(ckpt.LocalStore(root, Busy()), 1) == [1]
    assert len(list((root / "objects").iterdir())) == 3, "what is left must stay marked"
    assert ckpt.lifecycle.remove_uncommitted(store) == ["00000001-test"]
    assert_nothing_left_over(root)


def test_a_failing_save_leaves_another_step_of_the_same_save_id(root):
    store = ckpt.LocalStore(root, UnsyncedFiles())
    save(store, 1, save_id="twice")
    with pytest.raises(ckpt.CheckpointError, match=r"step 2 .* is not saved: File exists"):
        save(store, 2, save_id="twice")
    assert_whole(store, 1)


def test_a_commit_whose_mark_stays_is_one(root):
    class Stubborn(ckpt.LocalStore):
        def remove_all(self, folder: str) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    save(Stubborn(root, UnsyncedFiles()), 1)
    assert_whole(root, 1)
    assert ckpt.lifecycle.remove_uncommitted(root) == []
    assert_nothing_left_over(root)


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
        assert ckpt.lifecycle.remove_uncommitted(tmp_path) == []
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
