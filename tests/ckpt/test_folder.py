"""Folders that are whole or not there, and locks of files."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import ckpt.store.folder
from ckpt.store import Files, lock_file, new_folder


def test_a_folder_is_there_at_the_end_and_whole(tmp_path):
    target = tmp_path / "deep" / "out"
    with new_folder(target) as hidden:
        (hidden / "a").write_text("1")
        (hidden / "inner").mkdir()
        assert not target.exists()
        assert hidden.parent == target.parent, "a rename stays on one file system"
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    assert (target / "a").read_text() == "1"


def test_the_names_of_new_folders_above_are_durable_too(tmp_path, monkeypatch):
    target, synced = tmp_path / "deep" / "deeper" / "out", set()

    class Recorded(Files):
        def sync_folder(self, path):
            super().sync_folder(path)
            if target.exists():
                synced.add(path)

    monkeypatch.setattr(ckpt.store.folder, "_FILES", Recorded())
    with new_folder(target):
        pass
    assert {target.parent, target.parent.parent, tmp_path} <= synced


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), ValueError("no")])
def test_what_stops_half_way_leaves_nothing(tmp_path, error):
    def write() -> None:
        with new_folder(tmp_path / "out") as hidden:
            (hidden / "a").write_text("1")
            raise error

    with pytest.raises(type(error)):
        write()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_never_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="must not exist"), new_folder(tmp_path / "out"):
        pass

    def write_what_another_process_makes() -> None:
        with new_folder(tmp_path / "late"):
            (tmp_path / "late").mkdir()

    with pytest.raises(FileExistsError, match="must not exist"):
        write_what_another_process_makes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late", "out"]


def test_a_lock_is_held_by_one_process(tmp_path):
    code = (
        "import sys; from pathlib import Path; from ckpt.store import lock_file\n"
        "try: lock_file(Path(sys.argv[1]))\n"
        "except BlockingIOError: sys.exit(7)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lock")]
    handle = lock_file(tmp_path / "lock")
    assert subprocess.run(command, check=False).returncode == 7
    os.close(handle)
    assert subprocess.run(command, check=False).returncode == 0
