"""Checkpoints in node-local tiers: a node's memory, a neighbour's memory, a node's own disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import ckpt
from ckpt import CheckpointError, Location, Manifest, Tier
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.observe import Notice, Restored
from pretrain.state import Progress, run_id_of


def restore_from_nodes(
    job: Job,
    tiers: Sequence[Tier],
    shared_step: int,
    run_id: str,
    load: Callable[[Manifest, Location], Progress],
    began: float,
) -> tuple[Progress, Manifest] | None:
    """Load the newest checkpoint that every rank finds in its node's tiers, unless the shared
    folder has a newer one; None where that is so, or where there is none. Every rank must call.

    A checkpoint in a node's tier that cannot be read is published as a notice, and the next older
    one is tried. (A damaged checkpoint in the shared folder is an error instead.) Checkpoints of
    another run are not taken.

    Args:
        job: what is filled.
        tiers: the node-local tiers, the fastest first.
        shared_step: the newest step in the shared folder, or -1.
        run_id: see :func:`pretrain.checkpoint.run_id.run_id`.
        load: fills the job from a manifest in a tier.
        began: when the restore began, in seconds of :func:`time.perf_counter`.
    """
    runtime = job.runtime
    own = [tier for tier in tiers if tier.committer == runtime.rank]
    for tier in own:
        _try_tier(job, tier, ckpt.lifecycle.remove_uncommitted)
    runtime.agree(True)
    found = [
        (tier, manifest)
        for tier in tiers
        for manifest in ckpt.lifecycle.reachable(
            tier.location, job.topology, runtime.rank, partial(_is_of, run_id)
        )
    ]
    mine = {(manifest.step, ckpt.lifecycle.fingerprint(manifest)) for _, manifest in found}
    common = set.intersection(*map(set, runtime.gather_pairs(sorted(mine))))
    loaded, tried = None, False
    for step, fingerprint in sorted(common, reverse=True):
        if step < shared_step or loaded is not None:
            break
        taken = ""
        for tier, manifest in found:
            here = manifest.step, ckpt.lifecycle.fingerprint(manifest)
            if loaded is None and here == (step, fingerprint):
                try:
                    loaded, taken = (load(manifest, tier.location), manifest), tier.name
                except (CheckpointError, InputError) as error:
                    _note(job, step, f"not from tier {tier.name}: {error}", problem=True)
        if not runtime.agree(loaded is not None):
            loaded = None
        else:
            seconds = time.perf_counter() - began
            job.events.publish(Restored(step=step, tier=taken, seconds=seconds))
        tried = True
    if tried and loaded is None and shared_step < 0:
        # Some ranks have loaded parts: fresh weights would not undo their moments and counters.
        raise CheckpointError(
            "no checkpoint in the node-local tiers can be read on every rank, and there is none in "
            f"{job.spec.checkpoint_path}; remove the tiers' folders to start over"
        )
    return loaded


def forget_others(job: Job, tiers: Sequence[Tier], run_id: str, after: int) -> None:
    """Remove from this node's tiers the checkpoints of other runs, and of steps beyond ``after``.

    To be called once the run is certain to resume after ``after``.
    """

    def forget(location: str) -> None:
        steps = ckpt.lifecycle.prune(location, after, partial(_is_of, run_id))
        if steps:
            _note(job, after, f"steps {steps} in {location} are removed: the run resumes elsewhere")

    for tier in tiers:
        if tier.committer == job.runtime.rank:
            _try_tier(job, tier, forget)


def _is_of(run_id: str, manifest: Manifest) -> bool:
    return run_id_of(manifest) == run_id


def _try_tier(job: Job, tier: Tier, act: Callable[[str], object]) -> None:
    """Publish a tier that cannot be reached as a notice, and go on without the tier."""
    try:
        act(tier.location)
    except (CheckpointError, OSError) as error:
        _note(job, 0, f"tier {tier.name} cannot be used: {error}", problem=True)


def _note(job: Job, step: int, text: str, problem: bool = False) -> None:
    job.events.publish(Notice(step=step, text=text, problem=problem))
