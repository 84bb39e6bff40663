"""The history of a store: its checkpoints in order, with launches, resizes and spec changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.format import Manifest, committed_steps, read_manifest
from ckpt.store import Location, open_store


@dataclass(frozen=True)
class Link:
    """One checkpoint of a store, and what changed since the checkpoint before."""

    step: int
    save_id: str = ""
    launch: str = ""
    """See :attr:`Manifest.launch`."""
    created: str = ""
    seconds: float | None = None
    """Seconds between the creation times of the checkpoint before and this one; None where one of
    the times is missing."""
    bytes: int = 0
    topology: dict[str, int] | None = None
    spec_hash: str = ""
    parent: str | None = None
    """See :attr:`Manifest.parent`."""
    new_launch: bool = False
    """Whether the checkpoint before is of another launch."""
    resized: bool = False
    """Whether the checkpoint before has another topology."""
    spec_changes: tuple[tuple[str, Any, Any], ...] = ()
    """Each changed field of the spec, its value before, and its value now."""
    problem: str = ""
    """Why the manifest cannot be read; all other fields but the step are then empty."""


def read_lineage(root: Location) -> list[Link]:
    """Every checkpoint of a store, oldest first; of a damaged manifest a link with a ``problem``.

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
        links.append(_link(manifest, before))
        before = manifest
    return links


def spec_differences(before: Any, now: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """The fields in which two specs differ, with both values; None stands for a missing field."""
    if isinstance(before, dict) and isinstance(now, dict):
        found = []
        for key in sorted(before.keys() | now.keys()):
            inner = f"{path}.{key}" if path else key
            found += spec_differences(before.get(key), now.get(key), inner)
        return found
    return [] if before == now else [(path, before, now)]


def _link(manifest: Manifest, before: Manifest | None) -> Link:
    changes = []
    if before is not None:
        changes = spec_differences(before.spec, manifest.spec)
    return Link(
        step=manifest.step,
        save_id=manifest.save_id,
        launch=manifest.launch,
        created=manifest.created,
        seconds=None if before is None else _seconds(before.created, manifest.created),
        bytes=manifest.total_bytes,
        topology=manifest.topology,
        spec_hash=manifest.spec_hash,
        parent=manifest.parent,
        new_launch=before is not None and manifest.launch != before.launch,
        resized=before is not None and manifest.topology != before.topology,
        spec_changes=tuple(changes),
    )


def _seconds(before: str, now: str) -> float | None:
    try:
        return (datetime.fromisoformat(now) - datetime.fromisoformat(before)).total_seconds()
    except (ValueError, TypeError):  # not a time, or only one of the two has a time zone
        return None
