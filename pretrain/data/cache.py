"""Files of corpora in object stores, kept on a node's disk in a folder of bounded size.

A file is kept under the SHA-256 of its bytes, which was compared when the file was fetched. So a
file is never out of date, and all corpora, runs and ranks of a node share the folder::

    SHA256         a whole file, mapped by whoever reads it; its mtime is its last use
    SHA256.part    a file that one process fetches; it takes the name SHA256 at the end
    lock           held by whoever makes room

A process that maps a file holds a shared lock (flock) on it for as long as it is mapped, and a
process that fetches one holds an exclusive lock. Whoever makes room removes only files on which it
gets an exclusive lock. The kernel lets go of locks when a process ends, even after SIGKILL.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckpt.store import THREADS, Store
from corpus.config import is_remote
from corpus.location import blocks_of, damaged, store_at
from pretrain.errors import InputError, LostRankError

_NAME = re.compile(r"[0-9a-f]{64}(\.part)?")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_POLL_SECONDS = 0.02
_FETCHES = 2
"""Of a file whose bytes are not those of its hash."""


@dataclass(frozen=True)
class CacheCounts:
    """What a cache did since it was asked last."""

    hits: int = 0
    """Files that were on the disk when a batch needed them."""
    misses: int = 0
    """Files that were not."""
    fetched_bytes: int = 0
    retries: int = 0
    """Requests to the store that failed and were repeated."""


@dataclass(frozen=True)
class CachedFile:
    """A file that a cache can fetch."""

    place: str
    """The URL of its folder."""
    name: str
    sha256: str
    size: int
    """Bytes."""


class ShardCache:
    """The cache of one process; its methods may be called by several threads.

    Args:
        folder: on this node's disk, shared with other processes.
        limit_bytes: the most that the folder holds. It is exceeded only while all of its files are
            in use.
    """

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self.tell: Callable[[str, bool], None] = lambda text, problem: None
        """Told, in one line, that a store fails, which is a problem, or that it answers again; from
        any thread."""
        self._counts, self._lock = CacheCounts(), threading.Lock()
        self._stores: dict[str, Store] = {}
        self._failing: set[str] = set()
        self._pool: ThreadPoolExecutor | None = None

    def take_counts(self) -> CacheCounts:
        """The counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, CacheCounts()
        return counts

    def begin(self, file: CachedFile) -> Callable[[], np.ndarray]:
        """Let a thread fetch a file that is not here; the answer waits for the file, uint8 [size].

        The file stays on the disk for as long as the array is alive.

        The answer raises InputError where the file is not the one that its manifest names, and
        LostRankError where the store does not give it.
        """
        found = self._mapped(file)
        self._count(hits=int(found is not None), misses=int(found is None))
        if found is not None:
            return lambda: found
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(THREADS, "fetch")
        return self._pool.submit(self._fetched, file).result

    def _count(self, **more: int) -> None:
        with self._lock:
            now = {name: getattr(self._counts, name) + count for name, count in more.items()}
            self._counts = replace(self._counts, **now)

    def _mapped(self, file: CachedFile) -> np.ndarray | None:
        """The file where it is on the disk."""
        path = self.folder / file.sha256
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
            status = os.fstat(handle)
            if not status.st_nlink:  # removed before the lock was held
                return None
            if status.st_size != file.size:
                path.unlink(missing_ok=True)
                return None
            os.utime(handle)
            return _map(handle)
        finally:
            os.close(handle)

    def _fetched(self, file: CachedFile) -> np.ndarray:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            while True:
                found = self._mapped(file)
                if found is None:
                    found = self._fetch_or_wait(file)
                if found is not None:
                    return found
        except OSError as error:
            if not is_remote(str(error.filename)):
                full = "; lower data.cache_gib" if error.errno in _FULL else ""
                raise InputError(
                    f"data.cache_dir ({self.folder}) cannot take {file.name}: "
                    f"{error.strerror}{full}"
                ) from None
            text = f"corpus file {error.filename} cannot be read: {error.strerror}"
            if isinstance(error, FileNotFoundError | PermissionError):
                raise InputError(text) from None
            raise LostRankError(f"{text}; the same command resumes") from None

    def _fetch_or_wait(self, file: CachedFile) -> np.ndarray | None:
        """Fetch a file, or wait for the process that does; None where to look for it again."""
        path = self.folder / file.sha256
        part = path.with_name(f"{path.name}.part")
        handle = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            # Not a lock that waits: a file that is fetched meanwhile may stay mapped for ever.
            while not _locked(handle):
                if path.exists():
                    return None
                time.sleep(_POLL_SECONDS)
            if path.exists() or not os.fstat(handle).st_nlink:
                return None  # another process has fetched the file, or failed
            try:
                self._make_room(handle, file)
                self._fill(handle, file)
                part.rename(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            # From exclusive to shared: the file may be removed in between.
            fcntl.flock(handle, fcntl.LOCK_SH)
            return _map(handle) if os.fstat(handle).st_nlink else None
        finally:
            os.close(handle)

    def _make_room(self, handle: int, file: CachedFile) -> None:
        """Remove files that were not used for the longest time, and give the new one its size."""
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.ftruncate(handle, 0)
            files = _files(self.folder)
            total = sum(size for _, size, _ in files) + file.size
            for _, size, path in sorted(files):
                if total <= self.limit_bytes:
                    break
                if size and _removed(path):
                    total -= size
            os.ftruncate(handle, file.size)
        finally:
            os.close(lock)

    def _fill(self, handle: int, file: CachedFile) -> None:
        """Fetch the bytes of a file, and compare their hash."""
        store, digest = self._store(file.place), hashlib.sha256()
        for _ in range(_FETCHES):
            digest, at = hashlib.sha256(), 0
            for block in blocks_of(store, file.name):
                digest.update(block)
                if at + len(block) <= file.size:
                    _write(handle, block, at)
                at += len(block)
            self._count(fetched_bytes=at)
            self._answers(file.place)
            if digest.hexdigest() == file.sha256:
                os.fsync(handle)
                return
        raise InputError(damaged(store.where(file.name), digest.hexdigest(), file.sha256))

    def _store(self, place: str) -> Store:
        with self._lock:
            store = self._stores.get(place)
        if store is None:
            store = store_at(place, lambda error: self._fails(place, error))
            with self._lock:
                self._stores[place] = store
        return store

    def _fails(self, place: str, error: OSError) -> None:
        self._count(retries=1)
        with self._lock:
            is_news = place not in self._failing
            self._failing.add(place)
        if is_news:
            self.tell(f"{place} fails and is asked again: {error.strerror}", True)

    def _answers(self, place: str) -> None:
        with self._lock:
            is_news = place in self._failing
            self._failing.discard(place)
        if is_news:
            self.tell(f"{place} answers again", False)


def _map(handle: int) -> np.ndarray:
    """The bytes of a file. The map has a copy of the handle, and so the handle's lock."""
    if not os.fstat(handle).st_size:
        return np.empty(0, np.uint8)
    return np.frombuffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ), np.uint8)


def _files(folder: Path) -> list[tuple[int, int, Path]]:
    """The time of the last use, the bytes and the path of each file of a cache."""
    found = []
    for path in folder.iterdir():
        if _NAME.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # a fetch has ended meanwhile
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
    return found


def _locked(handle: int) -> bool:
    """Take the exclusive lock of a file; False where another process has a lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _removed(path: Path) -> bool:
    """Remove a file that nobody uses; False where somebody does."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not _locked(handle):
            return False
        path.unlink(missing_ok=True)
    finally:
        os.close(handle)
    return True


def _write(handle: int, block: memoryview, at: int) -> None:
    while block:
        count = os.pwrite(handle, block, at)
        block, at = block[count:], at + count
