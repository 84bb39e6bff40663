"""Removing checkpoints that are no longer wanted, and saves that were never committed."""

from __future__ import annotations

import contextlib
import errno
import re

from ckpt.format import (
    CheckpointError,
    committed_steps,
    manifest_key,
    objects_key,
    pending_key,
    read_manifest,
)
from ckpt.locations import Location, open_store
from ckpt.store import Store

_PENDING = pending_key("").rpartition("/")[2]
_DRAFT = re.compile(r"\.step-\d{8,}\.json\.[0-9a-f]{8}")


def retain(root: Location, keep: int) -> list[int]:
    """Keep the newest ``keep`` checkpoints; returns the steps removed.

    A manifest goes, durably, before its objects do: what remains listed is always whole. Raises
    OSError where a manifest cannot be removed.
    """
    assert keep >= 1, "the last good checkpoint is never removed"
    store, removed = open_store(root), []
    steps = committed_steps(store)
    # One whose commit was killed is listed, and may not be durable: it must be, before others go.
    store.settle(manifest_key(step) for step in steps[-keep:])
    for step in steps[:-keep]:
        try:
            save_id = read_manifest(store, step).save_id
        except CheckpointError:
            continue  # damaged: what it owns is unknown, and someone may want to look at it
        mark_unwanted(store, save_id)
        store.remove(manifest_key(step))
        remove_objects(store, save_id)
        removed.append(step)
    return removed


def remove_uncommitted(root: Location) -> list[str]:
    """Remove what interrupted saves and removals left; returns their save ids.

    Only what is marked as pending goes: the objects of a manifest that somebody moved away stay.
    Nothing is removed where a manifest is damaged, since it might be that of a pending one. Only
    for a folder that nobody else is saving into.
    """
    store = open_store(root)
    try:
        committed = committed_save_ids(store)
    except CheckpointError:
        return []
    store.settle(manifest_key(step) for step in committed_steps(store))  # as in retain
    for name in store.names("manifests"):
        if _DRAFT.fullmatch(name):
            store.remove(f"manifests/{name}")
    removed = []
    for name in store.names("objects"):
        if not name.startswith(_PENDING):
            continue
        save_id = name.removeprefix(_PENDING)
        if save_id in committed:
            # Interrupted just after the commit, or just before a removal.
            store.remove_all(pending_key(save_id))
        else:
            remove_objects(store, save_id)
            removed.append(save_id)
    return removed


def mark_unwanted(store: Store, save_id: str) -> None:
    """Make a save's objects a leftover, should their removal be interrupted."""
    mark = f"{pending_key(save_id)}/removed"
    try:
        with contextlib.suppress(FileExistsError):
            store.write(mark, [b""])
        store.settle([mark])
    except OSError as error:
        # Where there is no room for it, to make room is worth a leftover.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def committed_save_ids(store: Store) -> set[str]:
    """Those that have a manifest. Raises CheckpointError where one is damaged."""
    return {read_manifest(store, step).save_id for step in committed_steps(store)}


def remove_objects(store: Store, save_id: str) -> None:
    """Remove a save's objects, and then the mark that they may go: it stays while one stays."""
    store.remove_all(objects_key(save_id))
    if save_id not in store.names("objects"):
        store.settle([objects_key(save_id)])
        store.remove_all(pending_key(save_id))
