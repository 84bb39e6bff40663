"""Objects in a store that belong to no checkpoint."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import CheckpointError
from ckpt.format import committed_steps, manifest_key, objects_key, pending_key, read_manifest
from ckpt.lifecycle.removal import has_manifest, mark_for_removal, remove_objects
from ckpt.store import Location, Store, open_store

_PENDING = pending_key("").rpartition("/")[2]
_SAVE_ID = re.compile(r"(\d{8,18})-")
"""Save ids of runs begin with the step; other programs may name their saves otherwise."""
_DRAFT = re.compile(r"\.step-\d{8,}\.json\.[0-9a-f]{8}")

GarbageKind = Literal["draft", "mark", "uncommitted", "unlisted"]


@dataclass(frozen=True)
class Garbage:
    """Something in a store that no manifest needs.

    ``draft``: a manifest that was never published. ``mark``: the mark of a pending save that has a
    manifest; only the mark is removed. ``uncommitted``: a save that was interrupted, or whose
    removal was. ``unlisted``: objects without a mark and without a manifest; somebody may have
    moved the manifest away, and want the checkpoint back.
    """

    kind: GarbageKind
    name: str
    """The save id; for a draft the file name."""
    objects: int
    bytes: int
    modified: float
    """The time of the newest object, in seconds since 1970 by the store's clock; 0 for none."""
    stays: str = ""
    """Why :func:`remove_garbage` keeps it; empty where it is removed."""


def find_garbage(
    root: Location,
    grace_seconds: float = 0.0,
    unlisted: bool = False,
    now: Callable[[], float] = time.time,
) -> list[Garbage]:
    """List what no manifest needs; nothing is removed.

    Args:
        root: the store.
        grace_seconds: garbage younger than this stays: it may be a save in progress. Garbage with a
            time in the future stays too: a clock may have been set back.
        unlisted: whether unlisted objects are removed too.
        now: gives the time in seconds since 1970.

    While a manifest is damaged all objects stay: any of them may belong to it. Raises OSError where
    the store cannot be listed.
    """
    store = open_store(root)
    # List objects before manifests: a save committed in between then has a manifest in the list.
    names = store.names("objects")
    drafts = [name for name in store.names("manifests") if _DRAFT.fullmatch(name)]
    pending = {n.removeprefix(_PENDING) for n in names if n.startswith(_PENDING)}
    committed, damaged = _committed(store, pending)
    saves = {n for n in names if not n.startswith(".")}

    def described(kind: GarbageKind, name: str, listing: Iterable[tuple[int, float]]) -> Garbage:
        sizes = list(listing)
        modified = max((at for _, at in sizes), default=0.0)
        age = now() - modified
        stays = ""
        if kind in ("uncommitted", "unlisted") and damaged:
            stays = f"it may belong to {damaged}, which is damaged"
        elif grace_seconds and sizes and age < grace_seconds:
            stays = f"it is younger than {grace_seconds:g} s"
        elif kind == "unlisted" and not unlisted:
            stays = "its manifest may have been moved away"
        return Garbage(kind, name, len(sizes), sum(size for size, _ in sizes), modified, stays)

    found = []
    manifests = store.listing("manifests") if drafts else {}
    for name in drafts:
        found.append(described("draft", name, [manifests[name]] if name in manifests else []))
    for save_id in sorted(pending):
        marks = store.listing(pending_key(save_id)).values()
        if save_id in committed:
            found.append(described("mark", save_id, marks))
        else:
            objects = store.listing(objects_key(save_id)).values()
            found.append(described("uncommitted", save_id, [*marks, *objects]))
    for save_id in sorted(saves - pending - committed):
        found.append(described("unlisted", save_id, store.listing(objects_key(save_id)).values()))
    return found


def remove_garbage(root: Location, garbage: Iterable[Garbage]) -> list[Garbage]:
    """Remove the garbage that :func:`find_garbage` listed without ``stays``; returns the removed.

    Raises OSError where something cannot be removed.
    """
    store, removed = open_store(root), []
    goes = [each for each in garbage if not each.stays]
    if not goes:
        return []
    # The manifest of a killed commit may not be durable: make it so before anything is removed.
    store.sync(manifest_key(step) for step in committed_steps(store))
    for each in goes:
        if each.kind == "uncommitted":
            mark_for_removal(store, each.name)
    # A save committed since then did not see its mark, and is kept; a later commit sees the mark.
    names = [save.name for save in goes if save.kind == "uncommitted"]
    committed, damaged = _committed(store, names)
    for each in goes:
        if each.kind == "draft":
            store.remove(f"manifests/{each.name}")
        elif each.kind == "mark":
            store.remove_all(pending_key(each.name))
        elif each.name not in committed and not damaged:
            remove_objects(store, each.name)
        else:
            continue
        removed.append(each)
    return removed


def remove_uncommitted(root: Location) -> list[str]:
    """Remove the objects of interrupted saves and removals; returns their save ids.

    Only saves marked as pending are removed: the objects of a manifest that somebody moved away
    stay. Nothing is removed while a manifest is damaged: it may be that of a pending save. No other
    process may be saving to the store.
    """
    with contextlib.suppress(CheckpointError):
        removed = remove_garbage(root, find_garbage(root))
        return [each.name for each in removed if each.kind == "uncommitted"]
    return []


def _committed(store: Store, pending: Iterable[str]) -> tuple[set[str], str]:
    """The save ids of all readable manifests, and the path of the first damaged one.

    A list of manifests may lag behind. So those of pending saves are asked for by name too.
    """
    committed, damaged = set(), ""
    for step in committed_steps(store):
        try:
            committed.add(read_manifest(store, step).save_id)
        except CheckpointError:
            damaged = damaged or store.where(manifest_key(step))
    for save_id in set(pending) - committed:
        if (match := _SAVE_ID.match(save_id)) is None:
            continue
        step = int(match[1])
        try:
            if has_manifest(store, step, save_id):
                committed.add(save_id)
        except CheckpointError:
            damaged = damaged or store.where(manifest_key(step))
    return committed, damaged
