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
    """The objects of the checkpoint before the present save."""

    save_id: str
    receipt: Mapping[str, ObjectRecord]


@dataclass(frozen=True)
class StagedPart:
    """One object, and the buffer that holds its chunks, ``layout.chunk_stride`` bytes each."""

    layout: ObjectLayout
    buffer: Bytes

    @classmethod
    def of(
        cls, record: ArrayRecord, coordinates: tuple[int, ...], memory: Bytes, offset: int
    ) -> StagedPart:
        """The object that is staged at ``offset`` in ``memory``."""
        layout = ObjectLayout(record, coordinates)
        return cls(layout, memory[offset : offset + layout.padded_bytes])

    def sealed(self) -> tuple[list[memoryview | bytes], ObjectRecord]:
        """The object's bytes with their checksums, and its record in a manifest. Without
        compression the bytes are one part: the buffer itself."""
        encoder = Encoder(self.layout)
        parts = list(encoder.parts([self.buffer]))
        return parts, encoder.record


@dataclass(frozen=True)
class Written:
    """The objects of a rank in one tier, and how they got there."""

    receipt: Receipt
    bytes_written: int
    bytes_linked: int


def write_staged(
    store: Store, info: SaveInfo, staged: Sequence[StagedPart], previous: Previous | None
) -> Written:
    """Write staged objects; their names are durable after :func:`ckpt.write.sync`.

    An object that has not changed since the ``previous`` save is linked and not written again: its
    length, its checksum and each of its bytes are compared first.
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
