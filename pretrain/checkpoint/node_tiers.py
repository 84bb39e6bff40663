"""Checkpoints that a node has for itself: in its memory, in a neighbour's, on its own disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import ckpt
from ckpt import CheckpointError, Location, Manifest, Tier
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.observe import complain, say
from pretrain.state import Progress


def restore_from_nodes(
    job: Job,
    tiers: Sequence[Tier],
    shared_step: int,
    run_id: str,
    load: Callable[[Manifest, Location], Progress],
) -> Progress | None:
    """Load the newest checkpoint that every rank finds in its node's tiers, unless the shared
    folder has a newer one; None where that is so, or where there is none. Every rank must call.

    What cannot be read there is told, and the next older one is taken: the shared folder's are the
    ones that are never passed over. Those of another run are not taken.

    Args:
        job: what is filled.
        tiers: those of nodes, the fastest first.
        shared_step: the newest in the shared folder, or -1.
        run_id: see :func:`name_run`.
        load: fills the job from a manifest in a tier.
    """
    runtime = job.runtime
    own = [tier for tier in tiers if tier.writers[0] == runtime.rank]
    for tier in own:
        _try_tier(job, tier, ckpt.remove_uncommitted)
    runtime.agree(True)
    found = [
        (tier, manifest)
        for tier in tiers
        for manifest in ckpt.reachable(
            tier.location, job.topology, runtime.rank, partial(_is_of, run_id)
        )
    ]
    mine = {(manifest.step, ckpt.fingerprint(manifest)) for _, manifest in found}
    common = set.intersection(*map(set, runtime.gather_pairs(sorted(mine))))
    progress, tried = None, False
    for step, fingerprint in sorted(common, reverse=True):
        if step < shared_step or progress is not None:
            break
        taken = ""
        for tier, manifest in found:
            here = manifest.step, ckpt.fingerprint(manifest)
            if progress is None and here == (step, fingerprint):
                try:
                    progress, taken = load(manifest, tier.location), tier.name
                except (CheckpointError, InputError) as error:
                    complain(f"rank {runtime.rank}: not from tier {tier.name}: {error}")
        if not runtime.agree(progress is not None):
            progress = None
        elif runtime.is_first:
            say(f"restored step {step} from tier {taken}")
        tried = True
    if tried and progress is None and shared_step < 0:
        # Some ranks hold parts of it by now: first values would not undo moments and counters.
        raise CheckpointError(
            "no checkpoint of the nodes can be read on every rank, and there is none in "
            f"{job.spec.checkpoint_path}; remove the tiers' folders to start over"
        )
    return progress


def forget_others(job: Job, tiers: Sequence[Tier], run_id: str, after: int) -> None:
    """Remove from this node's tiers what is of another run, or of steps beyond ``after``: once it
    is certain that the run goes on from there."""

    def forget(location: str) -> None:
        steps = ckpt.forget(location, after, partial(_is_of, run_id))
        if steps:
            say(f"rank {job.runtime.rank}: steps {steps} in {location} are not gone on from")

    for tier in tiers:
        if tier.writers[0] == job.runtime.rank:
            _try_tier(job, tier, forget)


def _is_of(run_id: str, manifest: Manifest) -> bool:
    return manifest.state.get("run_id") == run_id


def _try_tier(job: Job, tier: Tier, act: Callable[[str], object]) -> None:
    """A node's tier that cannot be reached is told, and passed over."""
    try:
        act(tier.location)
    except (CheckpointError, OSError) as error:
        complain(f"rank {job.runtime.rank}: tier {tier.name} cannot be used: {error}")
