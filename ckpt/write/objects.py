"""Writing one rank's objects with several threads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue

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
from ckpt.store import Bytes, Store
from ckpt.write.commit import Receipt, SaveInfo

WRITERS = min(4, 2 * (os.cpu_count() or 1))
"""Threads that write objects: more than cores, since a thread mostly waits for the device."""
_METADATA_WRITERS = 8
"""Threads that write zarr.json files, which take a device's latency and hardly any bandwidth."""
WRITE_BYTES = 16 << 20
"""Bytes that a thread lays out before each write; longer writes are no faster."""


def write_metadata(store: Store, info: SaveInfo, records: list[ArrayRecord]) -> Receipt:
    """Write every zarr.json of a save; their names are durable after :func:`sync`."""
    folder = objects_key(info.save_id)

    def write(one: tuple[str, bytes]) -> tuple[str, ObjectRecord]:
        key, data = one
        store.write(f"{folder}/{key}", [data])
        return key, ObjectRecord.of(data)

    with ThreadPoolExecutor(_METADATA_WRITERS) as pool:
        return dict(pool.map(write, metadata_objects(records).items()))


def write_objects(
    store: Store,
    info: SaveInfo,
    objects: Iterable[tuple[ObjectLayout, ReadInto]],
) -> Receipt:
    """Write objects in several threads; their names are durable after :func:`sync`.

    Args:
        store: the store.
        info: the save.
        objects: the objects, each with a function that fills in the numbers of a box.
    """
    folder, todo = objects_key(info.save_id), list(objects)
    sizes = [layout.padded_bytes for layout, _ in todo]
    # To fault in new memory costs about as much as a copy: a small save allocates little.
    least = max((layout.chunk_stride for layout, _ in todo), default=0)
    size = min(WRITE_BYTES, max(sizes, default=0), max(least, sum(sizes) // (4 * WRITERS)))
    memories: LifoQueue[Bytes] = LifoQueue()  # last in, first out: that buffer is in the cache
    for _ in range(min(WRITERS, len(todo))):
        memories.put(aligned(size))

    def write(one: tuple[ObjectLayout, ReadInto]) -> tuple[str, ObjectRecord]:
        layout, read = one
        memory = memories.get()
        parts = _Parts(layout, read, memory)
        try:
            store.write(f"{folder}/{layout.key}", parts)
        finally:
            memories.put(memory)
        return layout.key, parts.encoder.record

    with ThreadPoolExecutor(WRITERS) as pool:
        return dict(pool.map(write, todo))


def sync(store: Store, info: SaveInfo, receipt: Iterable[str]) -> None:
    """Make the names of a rank's objects durable; once a save, since each folder costs an fsync."""
    store.sync(f"{objects_key(info.save_id)}/{key}" for key in receipt)


class _Parts:
    """The bytes of one object in parts; each iteration begins anew, for a store that retries."""

    def __init__(self, layout: ObjectLayout, read: ReadInto, memory: Bytes) -> None:
        self.encoder, self._read, self._memory = Encoder(layout), read, memory

    def __iter__(self) -> Iterator[memoryview | bytes]:
        self.encoder = Encoder(self.encoder.layout)
        return self.encoder.parts(self.encoder.fill(self._read, self._memory))
