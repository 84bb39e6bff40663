"""Where checkpoints are kept: named, immutable objects."""

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

from ckpt.store.posix import Files
from ckpt.store.protocol import Bytes, Reader

_SYNCS = 8  # at a time: the system does many together as fast as one


class LocalStore:
    """A folder on a local or a shared file system with hard links."""

    links = True

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root, self.files = root, files or Files()

    def where(self, key: str = "") -> str:
        """The path."""
        return str(self.root / key)

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        """As in Store. Half a file is removed; were it not, nothing would ever take it for one."""
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

    def settle(self, keys: Iterable[str]) -> None:
        """Sync every folder from the objects' up to the root."""
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

    def publish(self, key: str, data: bytes) -> None:
        """Write a draft, and link it: unlike a rename, a link fails where the name is taken."""
        path = self.root / key
        self._make_folders(path.parent)
        # The folders above may be new too. Those that are not ours may not be opened.
        for parent in (self.root, *self.root.resolve().parents):
            with contextlib.suppress(PermissionError):
                self.files.sync_folder(parent)
        draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            self.write(str(draft.relative_to(self.root)), [data])
            self.files.link(draft, path)
        finally:
            with contextlib.suppress(OSError):
                self.files.remove(draft)
        self.files.sync_folder(path.parent)

    @contextlib.contextmanager
    def open(self, key: str) -> Iterator[Reader]:
        """As in Store."""
        path = self.root / key
        # A pipe in its place would otherwise be waited for.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise OSError(errno.EINVAL, "it is not a file", str(path))
            yield _LocalReader(handle)
        finally:
            os.close(handle)

    def read(self, key: str) -> bytes:
        """As in Store."""
        with self.open(key) as reader:
            data = np.empty(reader.size, np.uint8)
            reader.read_into(0, [data])
        return data.tobytes()

    def names(self, folder: str) -> list[str]:
        """As in Store; an empty folder is a name too."""
        try:
            return sorted(os.listdir(self.root / folder))  # noqa: PTH208 - iterdir joins each
        except FileNotFoundError:
            return []

    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        """As in Store."""
        found, top = {}, self.root / folder
        for where, _, files in os.walk(top):
            for name in files:
                path = Path(where, name)
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = path.stat()
                    found[path.relative_to(top).as_posix()] = status.st_size, status.st_mtime
        return found

    def link(self, old: str, new: str) -> bool:
        """A hard link."""
        path = self.root / new
        self._make_folders(path.parent)
        try:
            self.files.link(self.root / old, path)
        except FileExistsError:
            raise
        except OSError:
            return False
        return True

    def remove(self, key: str) -> None:
        """As in Store."""
        path = self.root / key
        with contextlib.suppress(FileNotFoundError):
            self.files.remove(path)
            self.files.sync_folder(path.parent)

    def remove_all(self, folder: str) -> None:
        """As in Store. What cannot be removed stays, for the next time."""
        for where, folders, files in os.walk(self.root / folder, topdown=False):
            with contextlib.suppress(OSError):
                # Two that remove the same at once must not leave it to each other.
                for name in files:
                    with contextlib.suppress(FileNotFoundError):
                        self.files.remove(Path(where, name))
                for name in folders:
                    with contextlib.suppress(FileNotFoundError):
                        self.files.remove_folder(Path(where, name))
        with contextlib.suppress(OSError):
            self.files.remove_folder(self.root / folder)

    def free_bytes(self) -> int | None:
        """As in Store."""
        return shutil.disk_usage(self.root).free

    def _make_folders(self, path: Path) -> None:
        if not path.is_dir():
            self._make_folders(path.parent)
            self.files.make_folder(path)


class _LocalReader:
    def __init__(self, handle: int) -> None:
        self.handle, self.size = handle, os.fstat(handle).st_size

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        expected = sum(map(len, parts))
        found = os.preadv(self.handle, parts, start)  # type: ignore[arg-type]
        while found != expected:  # rare: the system may read less at a time
            more = os.preadv(self.handle, _after(parts, found), start + found)
            if not more:
                raise OSError(0, f"it ends at byte {start + found}")
            found += more

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        pass


def _after(parts: Sequence[Bytes], count: int) -> list[memoryview]:
    rest = []
    for part in parts:
        if count < part.nbytes:
            rest.append(part[count:].data)
        count = max(0, count - part.nbytes)
    return rest
