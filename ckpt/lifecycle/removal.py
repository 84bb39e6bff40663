"""Removal of a save: a durable mark first, the objects afterwards."""

from __future__ import annotations

import contextlib
import errno

from ckpt.format import (
    Manifest,
    committed_steps,
    decode_manifest,
    manifest_key,
    objects_key,
    pending_key,
    read_manifest,
)
from ckpt.store import Store

REMOVED = "removed"
"""The name of the mark of a save whose objects are being removed."""

_MARK_ATTEMPTS = 3


def mark_for_removal(store: Store, save_id: str) -> None:
    """Mark a save as being removed, so that the next start completes an interrupted removal."""
    mark = f"{pending_key(save_id)}/{REMOVED}"
    for attempt in range(_MARK_ATTEMPTS):
        try:
            with contextlib.suppress(FileExistsError):
                store.write(mark, [b""])
            store.sync([mark])
            return
        except FileNotFoundError:
            # Another process that removes this save has just removed the folder of its marks.
            if attempt == _MARK_ATTEMPTS - 1:
                raise
        except OSError as error:
            # On a full disk the removal goes on without the mark: it frees the missing space.
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return


def committed_save_ids(store: Store) -> set[str]:
    """The save ids of all manifests. Raises CheckpointError where a manifest is damaged."""
    return {read_manifest(store, step).save_id for step in committed_steps(store)}


def has_manifest(store: Store, step: int, save_id: str) -> bool:
    """Whether a save is the committed checkpoint of a step.

    The manifest is asked for by its name: the lists of an object store may lag behind what was put
    there. Raises CheckpointError where the manifest is damaged, and OSError.
    """
    key = manifest_key(step)
    try:
        data = store.read(key)
    except FileNotFoundError:
        return False
    return decode_manifest(data, store.where(key)).save_id == save_id


def remove_objects(store: Store, save_id: str) -> None:
    """Remove a save's objects, and then its marks; the marks stay while any object stays."""
    store.remove_all(objects_key(save_id))
    if save_id not in store.names("objects"):
        store.sync([objects_key(save_id)])
        store.remove_all(pending_key(save_id))


def first_problem(store: Store, manifest: Manifest) -> str | None:
    """The first object of a checkpoint that is missing or of another length, in words; None where
    there is no such object.

    Objects are not read. Raises OSError where the store cannot be listed.
    """
    folder = objects_key(manifest.save_id)
    found = store.listing(folder)
    for key, record in manifest.objects.items():
        where = store.where(f"{folder}/{key}")
        if key not in found:
            return f"object {where} is missing"
        if found[key][0] != record.bytes:
            return f"object {where} has {found[key][0]} bytes, the manifest says {record.bytes}"
    return None
