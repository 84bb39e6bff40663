"""Rewriting a checkpoint for another layout."""

from __future__ import annotations

from ckpt.format import Manifest
from ckpt.rewrite.checkpoint_target import CheckpointTarget
from ckpt.rewrite.engine import rewrite
from ckpt.rewrite.source import CheckpointSource, Source
from ckpt.rewrite.target import Progress
from ckpt.store import Location
from parallel.layout import Topology

MEMORY = 512 << 20
"""The bytes of memory that a rewrite may need, by default."""


def reshard(source: Location, manifest: Manifest, target: Location, topology: Topology) -> Manifest:
    """Write the checkpoint ``manifest`` of ``source`` into ``target``, for ``topology``.

    Numbers are copied bit by bit and everything read is verified. The manifest is written last, as
    for any save.

    Where an earlier call has committed this very reshard, its manifest is returned and nothing is
    written. Raises CheckpointError where ``target`` has another checkpoint of this step, or the
    source is damaged, or the target cannot be written: see :func:`ckpt.rewrite.rewrite`.
    """
    return write_checkpoint(CheckpointSource(source, manifest), target, topology)


def write_checkpoint(
    source: Source,
    target: Location,
    topology: Topology,
    progress: Progress = lambda _: None,
) -> Manifest:
    """Write a checkpoint from any source, as :func:`reshard` does."""
    made = CheckpointTarget(source, target, topology)
    rewrite(made, MEMORY, progress=progress)
    assert made.manifest is not None
    return made.manifest
