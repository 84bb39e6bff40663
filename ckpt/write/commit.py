"""The commit: receipts of all ranks, then one manifest."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ckpt.errors import CheckpointError
from ckpt.format import (
    ArrayRecord,
    Compression,
    Manifest,
    ObjectRecord,
    decode_manifest,
    encode_manifest,
    gather,
    manifest_key,
    metadata_objects,
    pending_key,
)
from ckpt.lifecycle import (
    REMOVED,
    committed_save_ids,
    mark_unwanted,
    remove_objects,
    what_is_wrong,
)
from ckpt.store import Location, Store, open_store
from parallel.layout import Topology

if TYPE_CHECKING:
    pass

Receipt = dict[str, ObjectRecord]
"""What one rank wrote, by key below the save id."""


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
    """Turn an error into GivenUpError where a later start has removed the marks and objects of this
    save; to be entered once :func:`begin` has left this rank's mark."""
    try:
        yield
    except GivenUpError:
        raise
    except (FileNotFoundError, CheckpointError):
        see_that_it_goes_on(store, info, rank)
        raise


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
