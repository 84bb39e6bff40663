"""The commit protocol: every rank writes a receipt of its objects, then one rank publishes the
manifest."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.format import (
    ArrayRecord,
    Compression,
    Manifest,
    ObjectRecord,
    PackedTensor,
    decode_manifest,
    encode_manifest,
    gather,
    manifest_key,
    metadata_keys,
    pending_key,
)
from ckpt.lifecycle import (
    REMOVED,
    committed_save_ids,
    first_problem,
    has_manifest,
    mark_for_removal,
    remove_objects,
)
from ckpt.store import Location, Store, open_store
from parallel.layout import Topology
from parallel.version import VERSION

Receipt = dict[str, ObjectRecord]
"""The objects that a rank wrote, by key below the save id."""


_FINISHED = re.compile(r"rank-(\d+)\.(json|failed)(?:-(\d+))?")
_ABANDONED = "a later start of the run has abandoned this save"


class SaveAbandonedError(CheckpointError):
    """A later start of the run is removing this save, which was still being written."""


@dataclass(frozen=True)
class SaveInfo:
    """What a manifest says besides the arrays; identical on all ranks."""

    save_id: str
    """The name of this save, new in the store; by custom ``{step:08d}-{launch}``."""
    step: int
    topology: Topology
    """The degrees of the parallel axes that the arrays are sharded over."""
    state: dict[str, Any]
    """Plain JSON for the trainer: counters, positions, anything that is no array."""
    spec: dict[str, Any]
    spec_hash: str
    ranks: tuple[int, ...] | None = None
    """The ranks that write to this store; None for all."""
    compression: Compression = "none"
    parent: str | None = None
    """The save id of the checkpoint that this one was converted from; None for a trainer's save."""
    packed: tuple[PackedTensor, ...] = ()
    """The tensors in the packs among the arrays."""

    def __post_init__(self) -> None:
        """Raises ValueError for what no manifest can have, before anything is written."""
        if not isinstance(self.step, int) or self.step < 0:
            raise ValueError(f"step ({self.step}) must be a whole number of at least 0")
        if "/" in self.save_id or self.save_id[:1] in ("", "."):
            raise ValueError(
                f"save_id ({self.save_id!r}) must be a name without '/' that does not begin with "
                f"'.'"
            )
        for field in ("state", "spec"):
            found = _not_json(getattr(self, field), field)
            if found is not None:
                raise ValueError(f"{found} must be plain JSON; save a tensor as an array")

    @property
    def writers(self) -> Sequence[int]:
        """The ranks that write to this store; the first of them commits."""
        return range(self.topology.world) if self.ranks is None else self.ranks


def _not_json(value: Any, path: str) -> str | None:
    """The path and the type of the first value that is no JSON; None where there is none."""
    if value is None or isinstance(value, str | int | float):
        return None
    if isinstance(value, list | tuple):
        parts = ((f"{path}[{i}]", each) for i, each in enumerate(value))
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        parts = ((f"{path}[{key!r}]", each) for key, each in value.items())
    else:
        return f"{path} ({type(value).__name__})"
    return next((found for at, each in parts if (found := _not_json(each, at))), None)


def begin(store: Store, info: SaveInfo, rank: int) -> None:
    """Durably mark a save as not yet committed, before any of its objects is written."""
    key = f"{pending_key(info.save_id)}/rank-{rank}.begun"
    store.write(key, [b""])
    store.sync([key])


def check_not_abandoned(store: Store, info: SaveInfo, rank: int) -> None:
    """Raises SaveAbandonedError where a later start of the run is removing this save.

    The later start, perhaps on other machines, resumed from an older step, and will save this step
    itself. This rank's objects are removed first.
    """
    names = store.names(pending_key(info.save_id))
    if f"rank-{rank}.begun" not in names or REMOVED in names:
        with contextlib.suppress(OSError):  # the next start removes what could not be removed
            mark_for_removal(store, info.save_id)
            remove_objects(store, info.save_id)
        raise SaveAbandonedError(_ABANDONED)


@contextlib.contextmanager
def abandonment_reported(store: Store, info: SaveInfo, rank: int) -> Iterator[None]:
    """Raise SaveAbandonedError in place of an error that the removal by a later start caused.

    The removal of marks and objects makes this rank's operations on the save fail. To be entered
    after :func:`begin`.
    """
    try:
        yield
    except SaveAbandonedError:
        raise
    except (FileNotFoundError, CheckpointError):
        check_not_abandoned(store, info, rank)
        raise


def write_receipt(store: Store, info: SaveInfo, rank: int, receipt: Receipt) -> None:
    """Publish the list of the objects that this rank has written; all of them must be durable."""
    store.publish(_receipt_key(info, rank), json.dumps(receipt).encode())


def _receipt_key(info: SaveInfo, rank: int) -> str:
    return f"{pending_key(info.save_id)}/rank-{rank}.json"


def write_failure(store: Store, info: SaveInfo, rank: int, number: int | None = None) -> None:
    """Tell the other ranks that this rank's objects will not come.

    ``number`` is the errno of the reason, if there is one. The name of the file has it: a full disk
    takes an empty file where it takes no byte.
    """
    reason = "" if number is None else f"-{number}"
    store.publish(f"{pending_key(info.save_id)}/rank-{rank}.failed{reason}", b"")


def finished_ranks(store: Store, info: SaveInfo) -> dict[int, bool]:
    """For each rank that has finished: whether it left a receipt (True) or a failure (False)."""
    finished = {}
    for name in store.names(pending_key(info.save_id)):
        match = _FINISHED.fullmatch(name)
        if match:
            finished[int(match[1])] = match[2] == "json"
    return finished


def failure_of_others(store: Store, info: SaveInfo) -> str:
    """Which ranks left a failure, and why, in one line for people."""
    reasons = {}
    for name in store.names(pending_key(info.save_id)):
        match = _FINISHED.fullmatch(name)
        if match and match[2] == "failed":
            reasons[int(match[1])] = f": {os.strerror(int(match[3]))}" if match[3] else ""
    if not reasons:
        return "another rank could not write its part"
    first = min(reasons)
    who = f"rank {first}" if len(reasons) == 1 else f"rank {first} and {len(reasons) - 1} more"
    return f"{who} could not write{reasons[first]}"


def read_receipts(store: Store, info: SaveInfo) -> Receipt:
    """The objects of all ranks. Raises CheckpointError where a rank left no receipt."""
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
    """Publish the manifest of a save; from this moment the checkpoint exists.

    Args:
        root: the checkpoint folder or store.
        info: what the manifest holds besides the arrays.
        records: all arrays.
        objects: all objects of the save; they must be durable.

    Returns:
        The manifest, durable.

    Raises:
        CheckpointError: where ``objects`` lacks some or has others, where the step already has a
            manifest, or where a later start of the run is removing this save.
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
        packed=info.packed,
        state=info.state,
        spec=info.spec,
        spec_hash=info.spec_hash,
        versions=_versions(),
    )
    names = list(metadata_keys(records))
    gathered = gather(records, names, empty.sorted_coordinates, objects)
    key = manifest_key(info.step)
    for what, keys in (("lacks", gathered.missing), ("has a stray", gathered.stray)):
        if keys:
            where = store.where(key)
            raise CheckpointError(f"manifest {where} {what} object {keys[0]} ({len(keys)} in all)")
    manifest = empty.model_copy(update={"metadata": gathered.metadata, "stored": gathered.stored})
    data = encode_manifest(manifest)
    decode_manifest(data, store.where(key))  # raises for a manifest that no reader would accept
    try:
        store.publish(key, data)
    except FileExistsError:
        raise CheckpointError(
            f"step {info.step} already has a checkpoint in {store.where()}; save elsewhere, or "
            f"move {key.rpartition('/')[2]} away"
        ) from None
    marks = store.names(pending_key(info.save_id))
    begun = f"rank-{info.writers[0]}.begun" in marks
    if REMOVED in marks or (not begun and first_problem(store, manifest)):
        # A later start listed the manifests before this one was there: it removes the objects, and
        # then the marks. Receipts may have come after that.
        store.remove(key)
        raise SaveAbandonedError(_ABANDONED)
    with contextlib.suppress(OSError):  # the save is committed; the next start removes the mark
        store.remove_all(pending_key(info.save_id))
    return manifest


@cache
def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "zarr", "numpy")} | {"convoy-moe": VERSION}


def discard(root: Location, info: SaveInfo) -> None:
    """Remove the objects of a failed save, unless the save was committed after all."""
    store = open_store(root)
    # Where a manifest is damaged or cannot be read, the objects stay, marked as pending.
    with contextlib.suppress(CheckpointError, OSError):
        listed = committed_save_ids(store)
        if info.save_id not in listed and not has_manifest(store, info.step, info.save_id):
            remove_objects(store, info.save_id)
