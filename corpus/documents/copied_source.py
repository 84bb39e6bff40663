"""Documents in an object store, copied to this machine before they are read."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from ckpt.store import THREADS, Store
from corpus.errors import InputError
from corpus.location import blocks_of, is_there, store_at


def copy_source(source: str, folder: Path, say: Callable[[str], None]) -> Path:
    """Copy all objects below ``source`` into a folder, with their names and times.

    Objects that an earlier start has copied are not copied again, unless they changed since.

    Raises InputError where there is no such object, and OSError where one cannot be read or
    written.
    """
    if glob.has_magic(source):
        raise InputError(
            f"data.source ({source}) must have no wildcards in an object store; name a prefix"
        )
    store = store_at(source)
    objects = store.listing("")
    if not objects and is_there(source):
        parent, _, name = source.rpartition("/")
        store = store_at(parent)
        objects = {name: store.listing("")[name]}
    if not objects:
        raise InputError(f"data.source ({source}) must be a prefix or an object that exists")
    outside = next((key for key in objects if ".." in PurePosixPath(key).parts), None)
    if outside is not None:
        raise InputError(f"data.source: {store.where(outside)} must not have .. in its name")
    missing = [key for key, status in objects.items() if _status(folder / key) != status]
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        if path.relative_to(folder).as_posix() not in objects:
            path.unlink()
    if missing:
        size = sum(objects[key][0] for key in missing)
        say(f"copying {len(missing):,} objects of {source}, {size / 1e6:,.1f} MB")
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda key: _copy(store, key, folder / key, objects[key][1]), missing))
    return folder


def _status(path: Path) -> tuple[int, float] | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_size, status.st_mtime


def _copy(store: Store, key: str, path: Path, changed: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    with draft.open("wb") as file:
        for block in blocks_of(store, key):
            file.write(block)
    os.utime(draft, (changed, changed))
    draft.replace(path)
