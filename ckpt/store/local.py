"""A folder on a local or a shared file system as a store."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from typing_extensions import override

from ckpt.store.posix import Files, sync_parents
from ckpt.store.protocol import Bytes, Reader, Store

_SYNCS = 8  # at a time: the system runs several as fast as one


class LocalStore(Store):
    """A folder on a local or a shared file system with hard links.

    A write that fails removes the incomplete file.
    """

    links = True

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root, self.files = root, files or Files()

    @override
    def where(self, key: str = "") -> str:
        return str(self.root / key)

    @override
    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        path = self.root / key
        self._make_folders(path.parent)
        handle = self.files.create(path)
        try:
            for part in parts:
                self.files.append(handle, memoryview(part).cast("B"))
            self.files.sync(handle)
        except Exception:
            with contextlib.suppress(OSError):
                self.files.remove(path)
            raise
        finally:
            self.files.close(handle)

    @override
    def sync(self, keys: Iterable[str]) -> None:
        # Every folder from the objects' own up to the root.
        parents: set[Path] = set()
        for key in keys:
            path = (self.root / key).parent
            while path not in parents:
                parents.add(path)
                if path == self.root:
                    break
                path = path.parent
        with ThreadPoolExecutor(_SYNCS) as pool:
            list(pool.map(self.files.sync_folder, parents))

    @override
    def publish(self, key: str, data: bytes) -> None:
        # A draft is written, then linked: unlike a rename, a link fails where the name is taken.
        path = self.root / key
        self._make_folders(path.parent)
        self.files.sync_folder(self.root)
        sync_parents(self.files, self.root)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self.write(str(draft.relative_to(self.root)), [data])
            self.files.link(draft, path)
        finally:
            with contextlib.suppress(OSError):
                self.files.remove(draft)
        self.files.sync_folder(path.parent)

    @override
    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        path = self.root / key
        # Opening a pipe in place of the file would otherwise wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            mode = os.fstat(handle).st_mode
            if stat.S_ISDIR(mode):
                raise FileNotFoundError(errno.ENOENT, "is a folder, not an object", str(path))
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "is not a regular file", str(path))
            yield _LocalReader(handle)
        finally:
            os.close(handle)

    @override
    def read(self, key: str) -> bytes:
        with self.open(key) as reader:
            data = np.empty(reader.size, np.uint8)
            reader.read_into(0, [data])
        return data.tobytes()

    @override
    def names(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / folder))  # noqa: PTH208 - iterdir joins each
        except FileNotFoundError:
            return []

    @override
    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        found, top = {}, self.root / folder
        for where, _, files in os.walk(top):
            for name in files:
                path = Path(where, name)
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = path.stat()
                    found[path.relative_to(top).as_posix()] = status.st_size, status.st_mtime
        return found

    @override
    def link(self, old: str, new: str) -> bool:
        path = self.root / new
        self._make_folders(path.parent)
        try:
            self.files.link(self.root / old, path)
        except FileExistsError:
            raise
        except OSError:
            return False
        return True

    @override
    def remove(self, key: str) -> None:
        path = self.root / key
        with contextlib.suppress(FileNotFoundError):
            self.files.remove(path)
            self.files.sync_folder(path.parent)

    @override
    def remove_all(self, folder: str) -> None:
        for where, folders, files in os.walk(self.root / folder, topdown=False):
            with contextlib.suppress(OSError):
                for name in files:
                    with contextlib.suppress(FileNotFoundError):  # another process removed the file
                        self.files.remove(Path(where, name))
                for name in folders:
                    with contextlib.suppress(FileNotFoundError):
                        self.files.remove_folder(Path(where, name))
        with contextlib.suppress(OSError):
            self.files.remove_folder(self.root / folder)

    @override
    def free_bytes(self) -> int | None:
        return shutil.disk_usage(self.root).free

    def _make_folders(self, path: Path) -> None:
        if not path.is_dir():
            self._make_folders(path.parent)
            self.files.make_folder(path)


class _LocalReader(Reader):
    def __init__(self, handle: int) -> None:
        self.handle, self.size = handle, os.fstat(handle).st_size

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        expected = sum(map(len, parts))
        found = os.preadv(self.handle, parts, start)  # type: ignore[arg-type]
        while found != expected:  # rare: the system may read less than was asked for
            more = os.preadv(self.handle, _after(parts, found), start + found)
            if not more:
                raise OSError(0, f"it ends at byte {start + found}")
            found += more


def _after(parts: Sequence[Bytes], count: int) -> list[memoryview]:
    rest = []
    for part in parts:
        if count < part.nbytes:
            rest.append(part[count:].data)
        count = max(0, count - part.nbytes)
    return rest
