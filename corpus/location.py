"""Where a prepared corpus lies: in a folder, or in an object store."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt.store import LocalStore, Retrying, Store, holds, new_folder, open_store
from corpus.config import is_remote
from corpus.errors import InputError

_ATTEMPTS = 12
"""At one request to an object store: about half a minute, and a minute at most."""
_BLOCK = 8 << 20


def store_at(path: str | Path, told: Callable[[OSError], None] | None = None) -> Store:
    """The files at a path, which need not exist.

    Args:
        path: a folder, or the URL of an object store, whose requests are repeated with backoff.
        told: of the error of each request to an object store that is repeated.

    Raises InputError for the URL of no store, and where the package for the store is missing.
    """
    if not is_remote(path):
        return LocalStore(Path(path))
    try:
        return Retrying(open_store(str(path)), attempts=_ATTEMPTS, told=told)
    except ValueError as error:
        raise InputError(f"data: {str(error).removeprefix('checkpoint ')}") from None


def read_file(path: str | Path) -> bytes:
    """The bytes of a file by its path or URL. Raises OSError where it cannot be read."""
    if not is_remote(path):
        return Path(path).read_bytes()
    folder, _, name = str(path).rpartition("/")
    return store_at(folder).read(name)


def is_there(path: str | Path) -> bool:
    """Whether there is a file. Raises OSError where an object store does not answer."""
    if not is_remote(path):
        return Path(path).exists()
    folder, _, name = str(path).rpartition("/")
    try:
        with store_at(folder).open(name):
            return True
    except FileNotFoundError:
        return False


def blocks_of(store: Store, key: str) -> Iterator[memoryview]:
    """The bytes of a file, one block after another; each is valid until the next one."""
    with store.open(key) as reader:
        block = np.empty(min(_BLOCK, reader.size), np.uint8)
        for start in range(0, reader.size, _BLOCK):
            part = block[: min(_BLOCK, reader.size - start)]
            reader.read_into(start, [part])
            yield part.data


def damaged(where: str, found: str, wanted: str) -> str:
    """What is said of a file whose bytes are not those of its manifest."""
    return (
        f"corpus file {where} is damaged: its SHA-256 is {found[:12]}, its manifest says "
        f"{wanted[:12]}; restore it, or remove the corpus to prepare it anew"
    )


@contextmanager
def new_place(place: str, cache_dir: str, last: str) -> Iterator[Path]:
    """A folder whose files are at ``place`` when the block ends.

    Args:
        place: a folder, or the URL of a place in an object store.
        cache_dir: where the files of an object store are written first.
        last: the file that says that all are there.

    Raises FileExistsError where ``place`` is there already, and OSError where it cannot be written.
    """
    if not is_remote(place):
        with new_folder(Path(place)) as work:
            yield work
        return
    Path(cache_dir).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="new-", dir=cache_dir) as work:
        yield Path(work)
        upload(Path(work), place, last)


def upload(folder: Path, place: str, last: str) -> None:
    """Put all files of a folder into an object store, ``last`` as the last one.

    A file of an upload that was killed is replaced, unless it is the same.

    Raises FileExistsError where the store has ``last`` already, and OSError where it cannot be
    written.
    """
    store, local = store_at(place), LocalStore(folder)
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    for name in names:
        if name != last:
            _put(store, name, _Blocks(local, name))
    store.publish(last, local.read(last))


@dataclass(frozen=True)
class _Blocks:
    """The bytes of a file in blocks; each iteration begins anew, for a store that retries."""

    store: Store
    key: str

    def __iter__(self) -> Iterator[memoryview]:
        return blocks_of(self.store, self.key)


def _put(store: Store, key: str, blocks: _Blocks) -> None:
    try:
        store.write(key, blocks)
    except FileExistsError:
        if not holds(store, key, blocks):
            store.remove(key)
            store.write(key, blocks)
