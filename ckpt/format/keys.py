"""Names of objects and manifests within a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from ckpt.store import Location, open_store


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


def objects_dir(root: Path, save_id: str) -> Path:
    """The folder of one save's objects, itself a zarr group."""
    return root / objects_key(save_id)


def manifest_path(root: Path, step: int) -> Path:
    """The manifest of one step in a folder."""
    return root / manifest_key(step)
