"""The checkpoints in a tier that a rank can load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from hashlib import blake2b

from ckpt.errors import CheckpointError
from ckpt.format import (
    Manifest,
    committed_steps,
    keys_of_ranks,
    manifest_key,
    objects_key,
    read_manifest,
)
from ckpt.lifecycle.garbage import remove_uncommitted
from ckpt.lifecycle.removal import mark_for_removal
from ckpt.store import Location, Store, open_store
from parallel.layout import Topology

_MOST = 4
"""Checkpoints of a tier that are told of."""


def reachable(
    root: Location,
    topology: Topology,
    rank: int,
    wanted: Callable[[Manifest], bool] = lambda _: True,
) -> list[Manifest]:
    """The newest four checkpoints in a tier that have all objects that a rank needs, newest first.

    Objects are checked for their length; their checksums are verified when they are read. A
    checkpoint whose manifest or objects cannot be read is left out.

    Args:
        root: the tier.
        topology: that of the run.
        rank: the rank that will load.
        wanted: whether a checkpoint is considered.
    """
    store, found = open_store(root), list[Manifest]()
    with contextlib.suppress(CheckpointError):
        for step in reversed(committed_steps(store)):
            with contextlib.suppress(CheckpointError, OSError):
                manifest = read_manifest(store, step)
                if wanted(manifest) and _holds(store, manifest, topology, rank):
                    found.append(manifest)
            if len(found) == _MOST:
                break
    return found


def _holds(store: Store, manifest: Manifest, topology: Topology, rank: int) -> bool:
    keys: Iterable[str] = (key for record in manifest.arrays for key in record.object_keys())
    if manifest.ranks is not None:
        if manifest.topology != topology.as_dict() or rank not in manifest.ranks:
            return False
        keys = (
            key
            for record in manifest.arrays
            for key in keys_of_ranks(record, record.layout(topology), [rank])
        )
    for key in keys:
        with store.open(f"{objects_key(manifest.save_id)}/{key}") as reader:
            if reader.size != manifest.objects[key].bytes:
                return False
    return True


def fingerprint(manifest: Manifest) -> int:
    """A hash of the save id below 2**62: equal for equal saves, for comparison between ranks."""
    digest = blake2b(manifest.save_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def prune(root: Location, after: int, ours: Callable[[Manifest], bool]) -> list[int]:
    """Remove a tier's checkpoints of steps beyond ``after``, and those that are not ``ours``;
    returns their steps.

    A run that resumes at step ``after`` saves the later steps again. Only for the tier of one node:
    one rank may not decide about storage that all ranks share.
    """
    store, removed = open_store(root), []
    for step in committed_steps(store):
        manifest = None
        with contextlib.suppress(CheckpointError):
            manifest = read_manifest(store, step)
        if step <= after and (manifest is None or ours(manifest)):
            continue
        if manifest is not None:
            mark_for_removal(store, manifest.save_id)
        store.remove(manifest_key(step))
        removed.append(step)
    if removed:  # the next save needs the space
        remove_uncommitted(store)
    return removed
