"""Writing objects from the memory that they were staged in, without another copy of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.format import ArrayRecord, Encoder, ObjectLayout, ObjectRecord, objects_key
from ckpt.store import Bytes, Store, holds
from ckpt.write import WRITERS, Receipt, SaveInfo


@dataclass(frozen=True)
class Previous:
    """What this rank wrote, or found, in the save before."""

    save_id: str
    receipt: Mapping[str, ObjectRecord]


@dataclass(frozen=True)
class StagedPart:
    """One object, and the memory that it is laid out in: its chunks, a stride each."""

    layout: ObjectLayout
    room: Bytes

    @classmethod
    def of(
        cls, record: ArrayRecord, coordinates: tuple[int, ...], memory: Bytes, offset: int
    ) -> StagedPart:
        """The object that is staged at ``offset``."""
        layout = ObjectLayout(record, coordinates)
        return cls(layout, memory[offset : offset + layout.page_room])

    def sealed(self) -> tuple[list[memoryview | bytes], ObjectRecord]:
        """The object's bytes, with their checksums; where chunks are not compressed, all of it
        stays in place, and is one part."""
        encoder = Encoder(self.layout)
        parts = list(encoder.parts([self.room]))
        return parts, encoder.record


@dataclass(frozen=True)
class Written:
    """What became of some objects."""

    receipt: Receipt
    bytes_written: int
    bytes_linked: int


def write_staged(
    store: Store, info: SaveInfo, staged: Sequence[StagedPart], previous: Previous | None
) -> Written:
    """Make durable what is staged. An object that has not changed since the save before is given a
    second key, and not written again: its length, its checksum and each of its bytes are compared.
    See :func:`ckpt.write.settle`.
    """
    folder = objects_key(info.save_id)

    def write(one: StagedPart) -> tuple[str, ObjectRecord, bool]:
        parts, record = one.sealed()
        key = f"{folder}/{one.layout.key}"
        old = None if previous is None else previous.receipt.get(one.layout.key)
        if previous is not None and old == record and store.links:
            place = f"{objects_key(previous.save_id)}/{one.layout.key}"
            same = False
            with contextlib.suppress(OSError):  # an object that cannot be read is written anew
                same = holds(store, place, parts)
            if same and store.link(place, key):
                return one.layout.key, record, True
        store.write(key, parts)
        return one.layout.key, record, False

    with ThreadPoolExecutor(WRITERS) as pool:
        done = list(pool.map(write, staged))
    return Written(
        receipt={key: record for key, record, _ in done},
        bytes_written=sum(record.bytes for _, record, linked in done if not linked),
        bytes_linked=sum(record.bytes for _, record, linked in done if linked),
    )
