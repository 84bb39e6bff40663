"""Stores in which something happens at an operation that a test chooses.

Operations are counted, those that write and remove. Before one of them a kill, an error, or a
reader comes. Threads of a save run one at a time here, so that a count means the same operation
in each replay.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import ckpt
from ckpt.store.posix import Files
from ckpt.store.protocol import Bytes, Reader

SLASH = "%2F"
"""In names of files, for the / of a key."""
Hook = Callable[[str], None]
"""Called with the name of an operation that is about to happen."""


class Trigger:
    """Counts operations, and acts at one of them, or from one on."""

    def __init__(self, moment: int, act: Hook, *, lasts: bool = False) -> None:
        self.moment, self.act, self.lasts = moment, act, lasts
        self.count = 0
        self.fired = False
        self._lock = threading.RLock()

    def __call__(self, operation: str) -> None:
        with self._lock:
            number, self.count = self.count, self.count + 1
            if number == self.moment or (self.lasts and number > self.moment):
                self.fired = True
                self.act(operation)


def kill_self(_: str) -> None:
    """SIGKILL to this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def failing(number: int) -> Hook:
    """Raises an OSError of a number."""

    def fail(operation: str) -> None:
        if number == errno.ENOSPC and operation.startswith("remove"):
            return  # a full disk takes no new bytes, and gives old ones back
        raise OSError(number, os.strerror(number), f"during {operation}")

    return fail


class HookedFiles(Files):
    """Files of a folder that no crash of the machine meets."""

    OPERATIONS = tuple(n for n in vars(Files) if not n.startswith("_") and n != "close")

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __getattribute__(self, name: str) -> Any:
        if name in HookedFiles.OPERATIONS:
            self.hook(name)
        return super().__getattribute__(name)

    def sync(self, handle: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


class FlatStore(ckpt.Store):
    """An object store in one folder: keys are names, each object comes at once, nothing is linked.

    A process may be killed at any operation, and another process sees what is there. With
    ``loses_answers`` an operation that fails has taken effect.
    """

    links = False

    def __init__(self, root: Path, hook: Hook = lambda _: None, loses_answers: bool = False):
        self.root, self.hook, self.loses_answers = root, hook, loses_answers
        (root / "keys").mkdir(parents=True, exist_ok=True)
        (root / "uploads").mkdir(exist_ok=True)

    def _path(self, key: str) -> Path:
        return self.root / "keys" / key.replace("/", SLASH)

    def _operate(self, operation: str, act: Callable[[], None]) -> None:
        if self.loses_answers:
            act()
            self.hook(operation)
        else:
            self.hook(operation)
            act()

    def where(self, key: str = "") -> str:
        return f"flat://{self.root.name}/{key}"

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        self.publish(key, b"".join(bytes(part) for part in parts))

    def publish(self, key: str, data: bytes) -> None:
        path = self._path(key)

        def put() -> None:
            upload = self.root / "uploads" / f"{os.getpid()}-{threading.get_ident()}"
            upload.write_bytes(data)
            try:
                os.link(upload, path)
            except FileExistsError:
                taken = os.strerror(errno.EEXIST)
                raise FileExistsError(errno.EEXIST, taken, self.where(key)) from None
            finally:
                upload.unlink()

        self._operate("put", put)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        yield _Blob(self.read(key), self.where(key))

    def read(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            missing = os.strerror(errno.ENOENT)
            raise FileNotFoundError(errno.ENOENT, missing, self.where(key)) from None

    def _keys(self, folder: str) -> Iterator[tuple[str, Path]]:
        prefix = f"{folder}/" if folder else ""
        for name in sorted(os.listdir(self.root / "keys")):  # noqa: PTH208 - iterdir joins each
            key = name.replace(SLASH, "/")
            if key.startswith(prefix):
                yield key[len(prefix) :], self.root / "keys" / name

    def names(self, folder: str) -> list[str]:
        return sorted({key.partition("/")[0] for key, _ in self._keys(folder)})

    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        states = {key: path.stat() for key, path in self._keys(folder)}
        return {key: (state.st_size, state.st_mtime) for key, state in states.items()}

    def remove(self, key: str) -> None:
        self._operate("remove", lambda: self._path(key).unlink(missing_ok=True))

    def remove_all(self, folder: str) -> None:
        for _, path in list(self._keys(folder)):
            with contextlib.suppress(OSError):
                self._operate("remove", lambda path=path: path.unlink(missing_ok=True))


class _Blob(Reader):
    def __init__(self, data: bytes, where: str) -> None:
        self.data, self.size, self.where = data, len(data), where

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        for part in parts:
            if start + len(part) > self.size:
                raise OSError(errno.EIO, f"it ends at byte {self.size}", self.where)
            part[:] = np.frombuffer(self.data, np.uint8, len(part), start)
            start += len(part)


class _Inline:
    """An executor that does the work when asked, in the thread that asks."""

    def __init__(self, workers: int = 1) -> None:
        del workers

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """As of a pool of threads: all work is done, and an error is raised at its turn."""
        outcomes = [self._outcome(work, item) for item in items]

        def results() -> Iterator[Any]:
            for value, error in outcomes:
                if error is not None:
                    raise error
                yield value

        return results()

    @staticmethod
    def _outcome(work: Callable[[Any], Any], item: Any) -> tuple[Any, Exception | None]:
        try:
            return work(item), None
        except Exception as error:
            return None, error


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Saves and loads start no threads, so that operations have one order, and take little time."""
    modules = ("write.objects", "background.staged", "read.load", "read.verify", "store.local")
    with contextlib.ExitStack() as stack:
        for name in modules:
            stack.enter_context(mock.patch(f"ckpt.{name}.ThreadPoolExecutor", _Inline))
        yield


class InTurns:
    """A vote of ranks that are threads, of which one runs at a time: in rank order, up to the next
    vote."""

    def __init__(self, ranks: int) -> None:
        self.turn, self.ranks = 0, ranks
        self.votes = [True] * ranks
        self.decided = [True]
        self.condition = threading.Condition()

    def wait_for(self, rank: int) -> None:
        """Wait until it is the turn of a rank."""
        with self.condition:
            assert self.condition.wait_for(lambda: self.turn == rank, 60), "a rank is stuck"

    def pass_on(self, rank: int) -> None:
        """Let the next rank run."""
        with self.condition:
            self.turn = (rank + 1) % self.ranks
            self.condition.notify_all()

    def agree_of(self, rank: int) -> Callable[[bool], bool]:
        """The vote, as one rank calls it."""

        def agree(passed: bool) -> bool:
            self.votes[rank] = passed
            if rank == self.ranks - 1:
                self.decided.append(all(self.votes))
            number = len(self.decided) - (rank == self.ranks - 1)
            self.pass_on(rank)
            self.wait_for(rank)
            return self.decided[number]

        return agree
