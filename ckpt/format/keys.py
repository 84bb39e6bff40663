"""Keys in a checkpoint store. ``store.where(key)`` is the path or URL of a key, for messages."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.store import Location, as_location

_MANIFEST = re.compile(r"(?:(.*)/)?manifests/step-([0-9]{8,18})\.json")


def objects_key(save_id: str) -> str:
    """The folder of one save's objects, a zarr group."""
    return f"objects/{save_id}"


def pending_key(save_id: str) -> str:
    """The folder of marks of a save that no manifest lists: not yet committed, or being removed.

    The receipts of the ranks are here too.
    """
    return f"objects/.pending-{save_id}"


def manifest_key(step: int) -> str:
    """The manifest of one step."""
    return f"manifests/step-{step:08d}.json"


def locate(location: Location, step: int | None = None) -> tuple[Location, int | None]:
    """The checkpoint folder and the step that ``location`` names.

    The path of a manifest, ``FOLDER/manifests/step-00000240.json``, names its folder and its step.
    Any other location is a folder and keeps ``step``.

    Raises ValueError for a URL of no store, and where the manifest is of another step than
    ``step``.
    """
    if not isinstance(location, str | Path):
        return location, step
    match = _MANIFEST.fullmatch(str(location))
    if match is None:
        return as_location(location) if isinstance(location, str) else location, step
    named = int(match[2])
    if step is not None and step != named:
        raise ValueError(f"step ({step}) must be left out, or be that of the manifest {location}")
    return as_location("." if match[1] is None else match[1] or "/"), named
