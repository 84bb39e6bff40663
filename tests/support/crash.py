"""What a crash may leave of a folder, worked out from the operations that were done to it.

When the power goes, a file system owes nobody what was not synced. The model is the one of ALICE
(Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, sections 3 and 4), at its
weakest, so that what holds here holds on any POSIX file system:

- A file's bytes are durable once it was synced. Of those after, any number may be there, and of
  these any sectors may read as zeros.
- An entry of a folder (a name that was made, or removed) is durable once that folder was synced,
  and that folder is found after a crash only if its own entry is durable, and so on upwards. Of
  entries that were not, each may have come or not, in any order; one name goes through its states
  in turn.

A killed process loses nothing: that is the crash after which everything is there.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.store.posix import Files

SECTOR = 512


@dataclass(frozen=True)
class Operation:
    """One that succeeded. ``file`` is which of the created files a handle stood for."""

    kind: str
    path: Path | None = None
    other: Path | None = None
    file: int | None = None
    data: bytes = b""


class Killed(BaseException):
    """The process is dead: nothing it does from here on happens."""


class RecordedFiles(Files):
    """Does what Files does, and keeps a log; or dies before its ``dies_at``-th operation."""

    def __init__(self, dies_at: int | None = None) -> None:
        self.log: list[Operation] = []
        self.dies_at = dies_at
        self._lock = threading.RLock()
        self._files: dict[int, int] = {}
        self._count = 0

    def note(self, kind: str, step: int) -> None:
        """Put a word of the caller's into the log: what was promised up to here."""
        with self._lock:
            self.log.append(Operation(kind, file=step))

    def _alive(self) -> None:
        if self.dies_at is not None and len(self.log) >= self.dies_at:
            raise Killed

    def make_folder(self, path: Path) -> None:
        with self._lock:
            self._alive()
            new = not path.exists()
            super().make_folder(path)
            if new:
                self.log.append(Operation("make_folder", path))

    def create(self, path: Path) -> int:
        with self._lock:
            self._alive()
            handle = super().create(path)
            self._count += 1
            self._files[handle] = self._count
            self.log.append(Operation("create", path, file=self._count))
            return handle

    def append(self, handle: int, data: memoryview) -> None:
        with self._lock:
            self._alive()
            super().append(handle, data)
            self.log.append(Operation("append", file=self._files[handle], data=bytes(data)))

    def sync(self, handle: int) -> None:
        with self._lock:  # that it really reaches the disk matters to nobody here
            self._alive()
            self.log.append(Operation("sync", file=self._files[handle]))

    def sync_folder(self, path: Path) -> None:
        with self._lock:
            self._alive()
            self.log.append(Operation("sync_folder", path))

    def link(self, old: Path, new: Path) -> None:
        with self._lock:
            self._alive()
            super().link(old, new)
            self.log.append(Operation("link", old, new))

    def remove(self, path: Path) -> None:
        with self._lock:
            self._alive()
            super().remove(path)
            self.log.append(Operation("remove", path))

    def remove_folder(self, path: Path) -> None:
        with self._lock:
            self._alive()
            super().remove_folder(path)
            self.log.append(Operation("remove_folder", path))


class UnsyncedFiles(Files):
    """For folders that no crash will meet."""

    def sync(self, handle: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


@dataclass(eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: int = 0


@dataclass(eq=False)
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: dict[str, list[_File | _Folder | None]] = field(default_factory=dict)
    settled: dict[str, int] = field(default_factory=dict)
    """How many states of a name are no longer pending: a name's states are counted from 1."""

    def put(self, name: str, node: _File | _Folder | None) -> None:
        if node is None:
            del self.entries[name]
        else:
            self.entries[name] = node
        self.pending.setdefault(name, []).append(node)

    def last(self) -> dict[str, int]:
        """Of every name with pending states, the number of its newest state."""
        return {n: self.settled.get(n, 0) + len(states) for n, states in self.pending.items()}

    def sync(self, last: dict[str, int]) -> None:
        """Make the states up to those numbers durable: what was there when the sync began."""
        for name, number in last.items():
            count = number - self.settled.get(name, 0)
            if count <= 0:  # another sync was faster
                continue
            states = self.pending.pop(name)
            if (node := states[count - 1]) is None:
                self.durable.pop(name, None)
            else:
                self.durable[name] = node
            if states[count:]:
                self.pending[name] = states[count:]
            self.settled[name] = number


State = dict[str, bytes | None]
"""A tree: the bytes of every file by path below the base, None for a folder."""


class Disk:
    """A base folder, empty and durable, and what operations below it left there."""

    def __init__(self, base: Path) -> None:
        self.base, self.root = base, _Folder()
        self.files: dict[int, _File] = {}
        self._begun: dict[int, tuple[_Folder, dict[str, int]]] = {}

    def _find(self, path: Path) -> Any:
        node: Any = self.root
        for part in path.relative_to(self.base).parts:
            node = node.entries[part]
        return node

    def apply(self, op: Operation) -> None:
        kind, path = op.kind, op.path
        if path is not None and not path.is_relative_to(self.base):
            assert kind.endswith("sync_folder"), f"{kind} of {path}, outside of {self.base}"
        elif kind == "make_folder":
            self._find(path.parent).put(path.name, _Folder())
        elif kind == "create":
            self.files[op.file] = _File()
            self._find(path.parent).put(path.name, self.files[op.file])
        elif kind == "append":
            self.files[op.file].data += op.data
        elif kind == "sync":
            self.files[op.file].durable = len(self.files[op.file].data)
        elif kind == "begin_sync_folder":
            folder = self._find(path)
            self._begun[op.file] = folder, folder.last()
        elif kind == "sync_folder":
            folder, last = self._begun.pop(op.file, (None, {}))
            if folder is None:  # nothing happened meanwhile
                folder = self._find(path)
                last = folder.last()
            folder.sync(last)
        elif kind == "link":
            self._find(op.other.parent).put(op.other.name, self._find(path))
        elif kind in ("remove", "remove_folder"):
            self._find(path.parent).put(path.name, None)
        elif kind == "rename":
            self._find(op.other.parent).put(op.other.name, self._find(path))
            self._find(path.parent).put(path.name, None)

    def _folders(self) -> Iterator[_Folder]:
        """Every folder that may be there after a crash, whichever entries come and go."""
        todo, seen = [self.root], set()
        while todo:
            folder = todo.pop()
            if id(folder) in seen:
                continue
            seen.add(id(folder))
            yield folder
            nodes = [*folder.durable.values(), *(n for p in folder.pending.values() for n in p)]
            todo += [node for node in nodes if isinstance(node, _Folder)]

    def unsynced(self) -> list[tuple[int, str]]:
        """What a crash may or may not take: entries by folder and name, files by themselves."""
        found = [(id(folder), name) for folder in self._folders() for name in folder.pending]
        found += [(id(f), "") for f in self.files.values() if f.durable < len(f.data)]
        return found

    def after(self, survives: Callable[[int, str, int], int]) -> State:
        """The tree after a crash. ``survives`` has a say for every unsynced thing: how far a name
        went through its states, 0 to ``most``, or how many bytes of a file came after the durable
        ones; a negative number of bytes means that as many are zeros."""
        state: State = {}
        contents: dict[int, bytes] = {}

        def read(file: _File) -> bytes:
            if id(file) not in contents:
                rest = len(file.data) - file.durable
                count = survives(id(file), "", rest) if rest else 0
                tail = file.data[file.durable : file.durable + abs(count)]
                contents[id(file)] = bytes(file.data[: file.durable]) + (
                    bytes(tail) if count >= 0 else _holes(bytes(tail), count)
                )
            return contents[id(file)]

        def walk(folder: _Folder, prefix: str) -> None:
            for name in sorted(folder.durable.keys() | folder.pending.keys()):
                states = [folder.durable.get(name), *folder.pending.get(name, [])]
                reached = survives(id(folder), name, len(states) - 1) if len(states) > 1 else 0
                node = states[reached]
                if isinstance(node, _Folder):
                    state[prefix + name] = None
                    walk(node, f"{prefix}{name}/")
                elif node is not None:
                    state[prefix + name] = read(node)

        walk(self.root, "")
        return state

    def crashes(self, seeds: int, each: bool, seed: int = 0) -> Iterator[State]:
        """Trees that a crash now may leave: with all that is unsynced, with none, ``seeds`` random
        ones; and where ``each``, those with all but one thing, and with none but one."""
        yield self.after(lambda _, __, most: most)
        unsynced = self.unsynced()
        if not unsynced:
            return
        yield self.after(lambda *_: 0)
        for one in unsynced if each else []:
            yield self.after(lambda i, name, most, one=one: 0 if (i, name) == one else most)
            yield self.after(lambda i, name, most, one=one: most if (i, name) == one else 0)
        chance = random.Random(seed)
        for _ in range(seeds):
            yield self.after(lambda _, name, most: _any_of(chance, most, not name))


def _any_of(chance: random.Random, most: int, a_file: bool) -> int:
    count = chance.choice((0, most, chance.randint(0, most)))
    return -count if a_file and chance.random() < 0.4 else count


def _holes(data: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    sectors = [data[at : at + SECTOR] for at in range(0, len(data), SECTOR)]
    return b"".join(s if chance.random() < 0.3 else bytes(len(s)) for s in sectors)


def lay_out(state: State, base: Path) -> None:
    """Make a tree real."""
    base.mkdir()
    for name, data in state.items():  # a folder comes before what is in it
        if data is None:
            (base / name).mkdir()
        else:
            (base / name).write_bytes(data)
