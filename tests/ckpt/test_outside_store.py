"""A store that the house does not know, named in a URL: a file of SQLite."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.store import location
from ckpt.store.protocol import Bytes
from ckpt.testing import StoreContract
from parallel.layout import Topology
from tests.ckpt.test_kill import SPECS, save_for_ever
from tests.support.checkpoints import (
    assert_whole,
    ended,
    full_values,
    info,
    local_array,
    save_with_threads,
)
from tests.support.ranks import start_ranks

NAME = f"{__name__}:Database"


class Blob:
    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.size, self.name = data, len(data), where

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        for part in parts:
            if start + len(part) > self.size:
                raise OSError(errno.EIO, f"it ends at byte {self.size}", self.name)
            part[:] = np.frombuffer(self.data, np.uint8, len(part), start)
            start += len(part)

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        pass


class Database:
    """Imports nothing of Convoy."""

    links = False

    def __init__(self, url: str) -> None:
        self.url = url
        self.path = url.partition("://")[2]
        if not self.path.startswith("/"):
            raise ValueError(f"{url} must have the absolute path of a file")
        with self._connection() as database:
            database.execute(
                "CREATE TABLE IF NOT EXISTS objects (key TEXT PRIMARY KEY, data BLOB, time REAL)"
            )

    @contextlib.contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self.path, 60)) as database, database:
                yield database
        except sqlite3.OperationalError as error:
            raise OSError(errno.EIO, str(error), self.path) from None

    def where(self, key: str = "") -> str:
        return f"{self.url}/{key}" if key else self.url

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        self.publish(key, b"".join(bytes(part) for part in parts))

    def sync(self, keys: Iterable[str]) -> None:
        pass

    def publish(self, key: str, data: bytes) -> None:
        try:
            with self._connection() as database:
                database.execute("INSERT INTO objects VALUES (?, ?, ?)", (key, data, time.time()))
        except sqlite3.IntegrityError:
            message = os.strerror(errno.EEXIST)
            raise FileExistsError(errno.EEXIST, message, self.where(key)) from None

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Blob]:
        yield Blob(self.read(key), self.where(key))

    def read(self, key: str) -> bytes:
        with self._connection() as database:
            row = database.execute("SELECT data FROM objects WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.where(key))
        return bytes(row[0])

    def names(self, folder: str) -> list[str]:
        return sorted({key.split("/")[0] for key in self.listing(folder)})

    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        start = f"{folder}/" if folder else ""
        with self._connection() as database:
            rows = database.execute("SELECT key, length(data), time FROM objects").fetchall()
        return {key[len(start) :]: (n, t) for key, n, t in rows if key.startswith(start)}

    def link(self, old: str, new: str) -> bool:
        try:
            self.publish(new, self.read(old))
        except FileNotFoundError:
            return False
        return True

    def remove(self, key: str) -> None:
        with self._connection() as database:
            database.execute("DELETE FROM objects WHERE key = ?", (key,))

    def remove_all(self, folder: str) -> None:
        for key in self.listing(folder):
            self.remove(f"{folder}/{key}" if folder else key)

    def free_bytes(self) -> int | None:
        return None


class TestDatabase(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ckpt.Store:
        return Database(f"{NAME}://{tmp_path}/objects.db")


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"{NAME}://{tmp_path}/objects.db"


def test_a_named_class_is_opened_and_its_operations_are_repeated(root):
    store = ckpt.open_store(root)
    assert isinstance(store, ckpt.Retrying)
    assert isinstance(store.store, Database)
    assert store.where("a") == f"{root}/a"
    assert ckpt.store.as_location(root) == root
    assert not isinstance(ckpt.Retrying(store).store, ckpt.Retrying), "one layer repeats"


def test_an_entry_point_names_a_scheme(root, monkeypatch):
    def entry_points(group: str, name: str) -> list[EntryPoint]:
        there = EntryPoint("sqlite", NAME, "convoy.stores")
        return [there] if (there.group, there.name) == (group, name) else []

    monkeypatch.setattr(location, "entry_points", entry_points)
    store = ckpt.open_store(root.replace(NAME, "sqlite"))
    assert isinstance(store.store, Database)
    with pytest.raises(ValueError, match="must be a folder, or one of s3://"):
        ckpt.open_store("other://somewhere")


def test_it_is_saved_to_loaded_from_and_resharded_by_name(root, tmp_path):
    save_with_threads(root, 1, Topology(dp_shard=2, ep=2), SPECS, 1)
    tier = ckpt.Tier(name="shared", location=root)
    with ended(ckpt.AsyncCheckpointer([tier], 0, tmp_path / ".lock")) as saver:
        saver.ready()
        arrays = [local_array(spec, Topology(), 0, full_values(spec, 2)) for spec in SPECS]
        saver.save(info(2, Topology()), arrays)
        (event,) = saver.wait()
    assert event.what == "committed", event.error
    assert ckpt.committed_steps(root) == [1, 2]
    for step in (1, 2):
        assert_whole(root, step, SPECS)
    ckpt.retain(root, 1)
    assert ckpt.committed_steps(root) == [2]


def test_kills_leave_only_whole_checkpoints(root):
    newest = 0
    for _ in range(2):
        processes, _ = start_ranks(save_for_ever, 2, root)
        try:
            while not ckpt.committed_steps(root)[-1:] > [newest]:
                assert all(process.is_alive() for process in processes), "a rank died by itself"
                time.sleep(0.01)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
        steps = ckpt.committed_steps(root)
        newest = steps[-1]
        for step in steps:
            assert_whole(root, step, SPECS)


class NeedsMore(Database):
    def __init__(self, url: str, more: int) -> None:
        pass


class LacksAll:
    def __init__(self, url: str) -> None:
        raise AssertionError("it is called")


def store_of(url: str) -> Database:
    raise AssertionError("it is called")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("no_such_package.stores:Mine://x", "No module named 'no_such_package'"),
        (f"{__name__}:Missing://x", "has no attribute 'Missing'"),
        (f"{__name__}:NeedsMore://x", "NeedsMore must take the URL alone"),
        (
            f"{__name__}:LacksAll://x",
            "must be a class with the methods of ckpt.Store, and lacks fr",
        ),
        (f"{__name__}:store_of://x", "must be a class with the methods of ckpt.Store"),
        ("os:system://; exit 1", "system must be a class with the methods of ckpt.Store"),
        (f"{NAME}://relative", "must have the absolute path of a file"),
    ],
)
def test_what_cannot_be_opened_is_told_in_a_line(url, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        ckpt.open_store(url)

    assert url in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="give it as a str"):
        ckpt.open_store(Path(url))
