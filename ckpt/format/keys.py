"""Names of objects and manifests within a checkpoint folder."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.store import Location, as_location, open_store

_MANIFEST = re.compile(r"(?:(.*)/)?manifests/step-([0-9]{8,18})\.json")


def objects_key(save_id: str) -> str:
    """Where one save's objects are, themselves a zarr group."""
    return f"objects/{save_id}"


def pending_key(save_id: str) -> str:
    """There is something here while a save's objects are listed by no manifest: not yet, or no
    more. Ranks tell what they have written by receipts here."""
    return f"objects/.pending-{save_id}"


def manifest_key(step: int) -> str:
    """The manifest of one step."""
    return f"manifests/step-{step:08d}.json"


def manifest_name(root: Location, step: int) -> str:
    """The same in any store, for people."""
    return open_store(root).where(manifest_key(step))


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


def objects_dir(root: Path, save_id: str) -> Path:
    """The folder of one save's objects, itself a zarr group."""
    return root / objects_key(save_id)


def manifest_path(root: Path, step: int) -> Path:
    """The manifest of one step in a folder."""
    return root / manifest_key(step)
