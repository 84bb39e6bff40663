"""Removing checkpoints that are no longer wanted, and saves that were never committed."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckpt.format import CheckpointError, committed_steps, fsync_dir, manifest_path, read_manifest


def retain(root: Path, keep: int) -> list[int]:
    """Keep the newest ``keep`` checkpoints; returns the steps removed.

    A manifest goes, durably, before its objects do: what remains listed is always whole.
    """
    assert keep >= 1, "the last good checkpoint is never removed"
    removed = []
    for step in committed_steps(root)[:-keep]:
        try:
            save_id = read_manifest(root, step).save_id
        except CheckpointError:
            continue  # damaged: what it owns is unknown, and someone may want to look at it
        manifest_path(root, step).unlink()
        fsync_dir(root / "manifests")
        shutil.rmtree(root / "objects" / save_id, ignore_errors=True)
        removed.append(step)
    return removed


def remove_uncommitted(root: Path) -> list[str]:
    """Remove what interrupted saves left; returns the names of the folders removed.

    Only for a folder that nobody else is saving into. Raises CheckpointError, and removes
    nothing, where a manifest is damaged: its objects could not be told from a leftover.
    """
    objects = root / "objects"
    kept = {read_manifest(root, step).save_id for step in committed_steps(root)}
    stray = []
    if objects.is_dir():
        stray = [path for path in sorted(objects.iterdir()) if path.name not in kept]
    for path in stray:
        shutil.rmtree(path)
    for draft in (root / "manifests").glob(".*"):
        draft.unlink()
    return [path.name for path in stray]
