"""Writing a checkpoint: every rank its own objects, then one manifest."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from queue import LifoQueue
from typing import TYPE_CHECKING, Any, NoReturn

from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Compression,
    Manifest,
    OtherRankError,
    decode_manifest,
    encode_manifest,
    manifest_key,
    metadata_objects,
    objects_key,
    pending_key,
)
from ckpt.locations import Location, open_store
from ckpt.objects import ObjectRecord, gather
from ckpt.plan import own_cells
from ckpt.retention import (
    REMOVED,
    committed_save_ids,
    mark_unwanted,
    remove_objects,
    what_is_wrong,
)
from ckpt.shard import Encoder, ObjectLayout, ReadInto, aligned
from ckpt.store import Bytes, Store
from parallel.layout import Topology

if TYPE_CHECKING:
    from ckpt.tensors import LocalArray

Agree = Callable[[bool], bool]
"""A barrier that also asks: every rank gives its word, all learn whether all said yes."""
Receipt = dict[str, ObjectRecord]
"""What one rank wrote, by key below the save id."""
Progress = Callable[[int], None]
"""Called with the bytes of each object that has been written, by several threads."""

THREADS = min(4, os.cpu_count() or 1)
"""Objects that a rank reads at a time."""
WRITERS = min(4, 2 * (os.cpu_count() or 1))
"""Objects that it writes: more than it has cores, since a device is waited for."""
SMALL_THREADS = 8
"""The same, where a device's answers are waited for more than its bytes."""
WRITE_BYTES = 16 << 20
"""What a thread lays out before it writes: more at a time is no faster."""


_GIVEN_UP = "a later start of the run has given this save up"


class GivenUpError(CheckpointError):
    """Somebody else is removing a save that is being written."""


@dataclass(frozen=True)
class SaveInfo:
    """What a manifest says besides the arrays. ``save_id`` must be new, and alike on all ranks."""

    save_id: str
    step: int
    topology: Topology
    state: dict[str, Any]
    spec: dict[str, Any]
    spec_hash: str
    ranks: tuple[int, ...] | None = None
    """The ranks that write to this store; None for all."""
    compression: Compression = "none"
    parent: str | None = None
    """As in Manifest."""

    @property
    def writers(self) -> Sequence[int]:
        """The ranks that write to this store; the first of them commits."""
        return range(self.topology.world) if self.ranks is None else self.ranks


def save(
    root: Location, info: SaveInfo, arrays: Sequence[LocalArray], rank: int, agree: Agree
) -> Manifest | None:
    """Write and commit a checkpoint; every rank calls with the same arrays in the same order.

    Each rank works out from the topology alone which objects are its own. It leaves a receipt of
    what it wrote; the first rank reads the receipts, checks that together they are the whole, and
    publishes the manifest last, never over another.

    Args:
        root: the checkpoint folder or store, shared by all ranks.
        info: what else the manifest holds.
        arrays: this rank's slices; a rank without any part of an array still names it.
        rank: this rank.
        agree: see :data:`Agree`; ``lambda ok: ok`` for one process.

    Returns:
        The manifest, durable, on the first rank; None elsewhere.

    Raises:
        CheckpointError: on every rank if any could not write; nothing is committed then, and
            what was written is removed.
    """
    store = open_store(root)
    records = [array.spec.record(info.topology, info.compression) for array in arrays]
    failure: Exception | None = None
    try:
        begin(store, info, rank)
        receipt = write_metadata(store, info, records) if rank == info.writers[0] else {}
        todo = []
        for array, record in zip(arrays, records, strict=True):
            layout = array.spec.layout(info.topology)
            for coordinates in own_cells(record, layout, rank, info.ranks):
                todo.append((ObjectLayout(record, coordinates), array.read_into))
        todo.sort(key=lambda one: -one[0].length)  # no large one is left for the end
        receipt |= write_objects(store, info, todo)
        settle(store, info, receipt)
        leave_receipt(store, info, rank, receipt)
    except Exception as error:  # the others must learn of it, whatever it is
        failure = error
    if not agree(failure is None):
        _abandon(store, info, failure)

    manifest: Manifest | None = None
    if rank == info.writers[0]:
        try:
            manifest = commit(store, info, records, read_receipts(store, info))
        except Exception as error:
            failure = error
    if not agree(failure is None):
        _abandon(store, info, failure)
    return manifest


def begin(store: Store, info: SaveInfo, rank: int) -> None:
    """Mark a save as not yet committed, durably, before anything of it is written."""
    key = f"{pending_key(info.save_id)}/rank-{rank}.begun"
    store.write(key, [b""])
    store.settle([key])


def see_that_it_goes_on(store: Store, info: SaveInfo, rank: int) -> None:
    """Raises GivenUpError where a later start, perhaps on other machines, has taken this save for
    a leftover: it goes on from an older step, and will save this one itself."""
    names = store.names(pending_key(info.save_id))
    if f"rank-{rank}.begun" not in names or REMOVED in names:
        with contextlib.suppress(OSError):  # what stays is removed with the next start's leftovers
            mark_unwanted(store, info.save_id)
            remove_objects(store, info.save_id)
        raise GivenUpError(_GIVEN_UP)


@contextlib.contextmanager
def giving_up_is_told(store: Store, info: SaveInfo, rank: int) -> Iterator[None]:
    """An error because a later start has removed the marks and objects of this save becomes
    GivenUpError; only once :func:`begin` has left this rank's mark."""
    try:
        yield
    except GivenUpError:
        raise
    except (FileNotFoundError, CheckpointError):
        see_that_it_goes_on(store, info, rank)
        raise


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


def leave_receipt(store: Store, info: SaveInfo, rank: int, receipt: Receipt) -> None:
    """Say what this rank has written, all of it durable."""
    store.publish(_receipt_key(info, rank), json.dumps(receipt).encode())


def _receipt_key(info: SaveInfo, rank: int) -> str:
    return f"{pending_key(info.save_id)}/rank-{rank}.json"


def leave_failure(store: Store, info: SaveInfo, rank: int) -> None:
    """Say that this rank's part will not come."""
    store.publish(f"{pending_key(info.save_id)}/rank-{rank}.failed", b"")


def settled_ranks(store: Store, info: SaveInfo) -> dict[int, bool]:
    """The ranks that have written their part, True, or have given up, False."""
    ended = {}
    for name in store.names(pending_key(info.save_id)):
        match = re.fullmatch(r"rank-(\d+)\.(json|failed)", name)
        if match:
            ended[int(match[1])] = match[2] == "json"
    return ended


def read_receipts(store: Store, info: SaveInfo) -> Receipt:
    """What all ranks have written. Raises CheckpointError where one has left no receipt."""
    objects: Receipt = {}
    for rank in info.writers:
        key = _receipt_key(info, rank)
        try:
            body = json.loads(store.read(key))
        except FileNotFoundError:
            raise CheckpointError(
                f"rank {rank} left no receipt {store.where(key)}: checkpoint.path must be a folder "
                f"that every rank shares"
            ) from None
        count = len(objects) + len(body)
        objects.update({name: ObjectRecord(*pair) for name, pair in body.items()})
        assert len(objects) == count, f"rank {rank} wrote what another one wrote"
    return objects


def commit(
    root: Location, info: SaveInfo, records: list[ArrayRecord], objects: Receipt
) -> Manifest:
    """Publish the manifest of objects that are all durable: the moment a checkpoint exists.

    Raises CheckpointError where the objects are not the whole, the step has a manifest, or a later
    start is removing the save.
    """
    store = open_store(root)
    empty = Manifest(
        save_id=info.save_id,
        step=info.step,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        topology=info.topology.as_dict(),
        ranks=info.ranks,
        parent=info.parent,
        arrays=records,
        metadata={},
        stored=[],
        state=info.state,
        spec=info.spec,
        spec_hash=info.spec_hash,
        versions=_versions(),
    )
    names = list(metadata_objects(records))
    all_of_it = gather(records, names, empty.sorted_coordinates, objects)
    key = manifest_key(info.step)
    for what, keys in (("lacks", all_of_it.missing), ("has a stray", all_of_it.stray)):
        if keys:
            where = store.where(key)
            raise CheckpointError(f"manifest {where} {what} object {keys[0]} ({len(keys)} in all)")
    manifest = empty.model_copy(update={"metadata": all_of_it.metadata, "stored": all_of_it.stored})
    data = encode_manifest(manifest)
    decode_manifest(data, store.where(key))  # refuses what no reader would take
    try:
        store.publish(key, data)
    except FileExistsError:
        raise CheckpointError(
            f"step {info.step} already has a checkpoint in {store.where()}; save elsewhere, or "
            f"move {key.rpartition('/')[2]} away"
        ) from None
    marks = store.names(pending_key(info.save_id))
    if REMOVED in marks or (not marks and what_is_wrong(store, manifest)):
        # A start has looked for manifests just before there was one: it removes the objects, and
        # after them the marks.
        store.remove(key)
        raise GivenUpError(_GIVEN_UP)
    with contextlib.suppress(OSError):  # it is committed, marked or not: the next start clears up
        store.remove_all(pending_key(info.save_id))
    return manifest


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "zarr", "numpy", "convoy-moe")}


def discard(root: Location, info: SaveInfo) -> None:
    """Remove what a save that failed has written; one that was committed after all is left."""
    store = open_store(root)
    with contextlib.suppress(CheckpointError, OSError):  # what cannot be told is left, as pending
        if info.save_id not in committed_save_ids(store):
            remove_objects(store, info.save_id)


def _abandon(store: Store, info: SaveInfo, failure: Exception | None) -> NoReturn:
    what = f"checkpoint of step {info.step} in {store.where()} is not saved"
    if failure is None:
        raise OtherRankError(f"{what}: another rank could not write its part")
    discard(store, info)  # every rank has stopped writing: they have all given their word
    if not isinstance(failure, OSError):
        raise failure
    raise CheckpointError(f"{what}: {failure.strerror}: {failure.filename or store.where()}")
