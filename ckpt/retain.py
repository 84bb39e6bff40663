"""Removing checkpoints that are no longer wanted, and saves that were never committed."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckpt.format import (
    CheckpointError,
    committed_steps,
    draft_path,
    fsync_dir,
    manifest_path,
    objects_dir,
    pending_dir,
    read_manifest,
)


def retain(root: Path, keep: int) -> list[int]:
    """Keep the newest ``keep`` checkpoints; returns the steps removed.

    A manifest goes, durably, before its objects do: what remains listed is always whole. Raises
    OSError where a manifest cannot be removed.
    """
    assert keep >= 1, "the last good checkpoint is never removed"
    removed = []
    for step in committed_steps(root)[:-keep]:
        try:
            save_id = read_manifest(root, step).save_id
        except CheckpointError:
            continue  # damaged: what it owns is unknown, and someone may want to look at it
        # From here on they are a leftover, should this be interrupted.
        pending_dir(root, save_id).mkdir(exist_ok=True)
        manifest_path(root, step).unlink(missing_ok=True)
        fsync_dir(root / "manifests")
        _remove(root, save_id)
        removed.append(step)
    return removed


def remove_uncommitted(root: Path) -> list[str]:
    """Remove what interrupted saves and removals left; returns their save ids.

    Only what is marked as pending goes: the objects of a manifest that somebody moved away stay.
    Nothing is removed where a manifest is damaged, since it might be that of a pending one. Only
    for a folder that nobody else is saving into.
    """
    try:
        committed = {read_manifest(root, step).save_id for step in committed_steps(root)}
    except CheckpointError:
        return []
    removed = []
    for marker in sorted((root / "objects").glob(".pending-*")):
        save_id = marker.name.removeprefix(".pending-")
        if save_id in committed:
            shutil.rmtree(marker)  # interrupted just after the commit, or just before a removal
        else:
            draft_path(root, save_id).unlink(missing_ok=True)
            _remove(root, save_id)
            removed.append(save_id)
    return removed


def _remove(root: Path, save_id: str) -> None:
    shutil.rmtree(objects_dir(root, save_id), ignore_errors=True)
    shutil.rmtree(pending_dir(root, save_id), ignore_errors=True)
