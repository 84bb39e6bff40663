"""What lies in a store and belongs to no checkpoint."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ckpt.errors import CheckpointError
from ckpt.format import committed_steps, manifest_key, objects_key, pending_key, read_manifest
from ckpt.lifecycle.removal import mark_unwanted, remove_objects
from ckpt.store import Location, Store, open_store

_PENDING = pending_key("").rpartition("/")[2]
_DRAFT = re.compile(r"\.step-\d{8,}\.json\.[0-9a-f]{8}")

Kind = Literal["draft", "mark", "uncommitted", "unlisted"]


@dataclass(frozen=True)
class Garbage:
    """Something that no manifest needs.

    ``draft``: a manifest that was never published. ``mark``: a save is marked as pending that has a
    manifest; the mark is all that goes. ``uncommitted``: a save that was interrupted, or whose
    removal was. ``unlisted``: objects without a mark and without a manifest, which somebody may
    have moved away and want back.
    """

    kind: Kind
    name: str
    """The save id; of a draft, its file."""
    objects: int
    bytes: int
    modified: float
    """The store's time of its youngest object, in seconds since 1970; 0 where it has none."""
    stays: str = ""
    """Why it is not removed; empty where it is."""


def find_garbage(
    root: Location,
    grace_seconds: float = 0.0,
    unlisted: bool = False,
    now: Callable[[], float] = time.time,
) -> list[Garbage]:
    """List what no manifest needs; nothing is removed.

    Args:
        root: the store.
        grace_seconds: what is younger stays: it may be a save on its way. So does what is from the
            future, by a clock that went back.
        unlisted: let unlisted objects go too.
        now: seconds since 1970.

    Where a manifest is damaged all objects stay: they might be its own. Raises OSError where the
    store cannot be listed.
    """
    store = open_store(root)
    # Before the manifests: what is committed in between is listed by one.
    names = store.names("objects")
    drafts = [name for name in store.names("manifests") if _DRAFT.fullmatch(name)]
    committed, damaged = _committed(store)
    pending = {n.removeprefix(_PENDING) for n in names if n.startswith(_PENDING)}
    saves = {n for n in names if not n.startswith(".")}

    def told(kind: Kind, name: str, listing: Iterable[tuple[int, float]]) -> Garbage:
        sizes = list(listing)
        modified = max((at for _, at in sizes), default=0.0)
        age = now() - modified
        stays = ""
        if kind in ("uncommitted", "unlisted") and damaged:
            stays = f"it may be of {damaged}, which is damaged"
        elif grace_seconds and sizes and age < grace_seconds:
            stays = f"it is younger than {grace_seconds:g} s"
        elif kind == "unlisted" and not unlisted:
            stays = "its manifest may have been moved away"
        return Garbage(kind, name, len(sizes), sum(size for size, _ in sizes), modified, stays)

    found = []
    manifests = store.listing("manifests") if drafts else {}
    for name in drafts:
        found.append(told("draft", name, [manifests[name]] if name in manifests else []))
    for save_id in sorted(pending):
        marks = store.listing(pending_key(save_id)).values()
        if save_id in committed:
            found.append(told("mark", save_id, marks))
        else:
            objects = store.listing(objects_key(save_id)).values()
            found.append(told("uncommitted", save_id, [*marks, *objects]))
    for save_id in sorted(saves - pending - committed):
        found.append(told("unlisted", save_id, store.listing(objects_key(save_id)).values()))
    return found


def remove_garbage(root: Location, garbage: Iterable[Garbage]) -> list[Garbage]:
    """Remove what :func:`find_garbage` found, but for what stays; returns what was removed.

    Raises OSError where something cannot be.
    """
    store, removed = open_store(root), []
    goes = [each for each in garbage if not each.stays]
    if not goes:
        return []
    # A commit that was killed may not be durable; nothing goes before it is.
    store.settle(manifest_key(step) for step in committed_steps(store))
    for each in goes:
        if each.kind == "uncommitted":
            mark_unwanted(store, each.name)
    # Whoever has committed one since has not seen the mark; who has yet to will.
    committed, damaged = _committed(store)
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
    """Remove what interrupted saves and removals left; returns their save ids.

    Only what is marked as pending goes: the objects of a manifest that somebody moved away stay.
    Nothing is removed where a manifest is damaged, since it might be that of a pending one. Only
    for a store that nobody else is saving into.
    """
    with contextlib.suppress(CheckpointError):
        removed = remove_garbage(root, find_garbage(root))
        return [each.name for each in removed if each.kind == "uncommitted"]
    return []


def _committed(store: Store) -> tuple[set[str], str]:
    """The save ids of all manifests that can be read, and where the first of the others is."""
    committed, damaged = set(), ""
    for step in committed_steps(store):
        try:
            committed.add(read_manifest(store, step).save_id)
        except CheckpointError:
            damaged = damaged or store.where(manifest_key(step))
    return committed, damaged
