"""Where the checkpoints of a store come from: runs, resizes, changes of the spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.format import Manifest, committed_steps, read_manifest
from ckpt.store import Location, open_store


@dataclass(frozen=True)
class Link:
    """One checkpoint, and what is new in it since the one before."""

    step: int
    save_id: str = ""
    run: str = ""
    """The save id without the step: what tells launches apart."""
    created: str = ""
    seconds: float | None = None
    """Since the one before was saved, by the savers' clocks."""
    bytes: int = 0
    topology: dict[str, int] | None = None
    spec_hash: str = ""
    parent: str | None = None
    """As in Manifest."""
    new_run: bool = False
    resized: bool = False
    spec_changes: tuple[tuple[str, Any, Any], ...] = ()
    """Fields, what they were, and what they are."""
    problem: str = ""
    """Why there is nothing else here."""


def read_lineage(
    root: Location, upgraded: Callable[[dict[str, Any]], dict[str, Any]] = dict
) -> list[Link]:
    """Every checkpoint of a store, oldest first; one whose manifest is damaged says so.

    ``upgraded`` gives an earlier version's spec the present names, which are then no changes.

    Raises CheckpointError where the store cannot be listed.
    """
    store = open_store(root)
    links: list[Link] = []
    before: Manifest | None = None
    for step in committed_steps(store):
        try:
            manifest = read_manifest(store, step)
        except CheckpointError as error:
            links.append(Link(step, problem=str(error)))
            continue
        links.append(_link(manifest, before, upgraded))
        before = manifest
    return links


def spec_differences(before: Any, now: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """The fields of two specs that differ, with both values; None where one has no such field."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in sorted(before.keys() | now.keys()):
            inner = f"{path}.{key}" if path else key
            found += spec_differences(before.get(key), now.get(key), inner)
        return found
    return [] if before == now else [(path, before, now)]


def _link(
    manifest: Manifest,
    before: Manifest | None,
    upgraded: Callable[[dict[str, Any]], dict[str, Any]],
) -> Link:
    changes = []
    if before is not None:
        changes = spec_differences(upgraded(before.spec), upgraded(manifest.spec))
    return Link(
        step=manifest.step,
        save_id=manifest.save_id,
        run=_run(manifest),
        created=manifest.created,
        seconds=None if before is None else _seconds(before.created, manifest.created),
        bytes=manifest.total_bytes,
        topology=manifest.topology,
        spec_hash=manifest.spec_hash,
        parent=manifest.parent,
        new_run=before is not None and _run(manifest) != _run(before),
        resized=before is not None and manifest.topology != before.topology,
        spec_changes=tuple(changes),
    )


def _run(manifest: Manifest) -> str:
    return manifest.save_id.removeprefix(f"{manifest.step:08d}-")


def _seconds(before: str, now: str) -> float | None:
    try:
        return (datetime.fromisoformat(now) - datetime.fromisoformat(before)).total_seconds()
    except (ValueError, TypeError):  # not a time, or one of them without its zone
        return None
