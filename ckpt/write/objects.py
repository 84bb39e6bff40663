"""Writing one rank's objects with several threads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue
from typing import TYPE_CHECKING

from ckpt.format import (
    ArrayRecord,
    Encoder,
    ObjectLayout,
    ObjectRecord,
    ReadInto,
    aligned,
    metadata_objects,
    objects_key,
)
from ckpt.store import Bytes, Progress, Store
from ckpt.write.commit import Receipt, SaveInfo

if TYPE_CHECKING:
    pass

WRITERS = min(4, 2 * (os.cpu_count() or 1))
"""Objects that it writes: more than it has cores, since a device is waited for."""
SMALL_THREADS = 8
"""The same, where a device's answers are waited for more than its bytes."""
WRITE_BYTES = 16 << 20
"""What a thread lays out before it writes: more at a time is no faster."""


def write_metadata(store: Store, info: SaveInfo, records: list[ArrayRecord]) -> Receipt:
    """Write every zarr.json of a save; see :func:`settle`."""
    folder = objects_key(info.save_id)

    def write(one: tuple[str, bytes]) -> tuple[str, ObjectRecord]:
        key, data = one
        store.write(f"{folder}/{key}", [data])
        return key, ObjectRecord.of(data)

    with ThreadPoolExecutor(SMALL_THREADS) as pool:
        return dict(pool.map(write, metadata_objects(records).items()))


def write_objects(
    store: Store,
    info: SaveInfo,
    objects: Iterable[tuple[ObjectLayout, ReadInto]],
    progress: Progress = lambda _: None,
    threads: int = WRITERS,
    write_bytes: int = WRITE_BYTES,
) -> Receipt:
    """Write some objects, several at a time; each comes with a function that fills in numbers.

    Each thread lays out ``write_bytes`` before it writes them, or one chunk where that is more. See
    :func:`settle`.
    """
    folder, todo = objects_key(info.save_id), list(objects)
    rooms = [layout.page_room for layout, _ in todo]
    # New memory costs about what a copy costs: a small save takes little of it.
    least = max((layout.stride for layout, _ in todo), default=0)
    size = min(write_bytes, max(rooms, default=0), max(least, sum(rooms) // (4 * threads)))
    memories: LifoQueue[Bytes] = LifoQueue()  # what was written last is in the cache still
    for _ in range(min(threads, len(todo))):
        memories.put(aligned(size))

    def write(one: tuple[ObjectLayout, ReadInto]) -> tuple[str, ObjectRecord]:
        layout, read = one
        memory = memories.get()
        parts = _Parts(layout, read, memory)
        try:
            store.write(f"{folder}/{layout.key}", parts)
        finally:
            memories.put(memory)
        progress(parts.encoder.record.bytes)
        return layout.key, parts.encoder.record

    with ThreadPoolExecutor(threads) as pool:
        return dict(pool.map(write, todo))


def settle(store: Store, info: SaveInfo, receipt: Iterable[str]) -> None:
    """Make durable that what was written is there; once a save, since it takes the longer the more
    folders there are."""
    store.settle(f"{objects_key(info.save_id)}/{key}" for key in receipt)


class _Parts:
    """One object's, made anew each time that a store asks for them from the first on."""

    def __init__(self, layout: ObjectLayout, read: ReadInto, memory: Bytes) -> None:
        self.encoder, self._read, self._memory = Encoder(layout), read, memory

    def __iter__(self) -> Iterator[memoryview | bytes]:
        self.encoder = Encoder(self.encoder.layout)
        return self.encoder.parts(self.encoder.fill(self._read, self._memory))
