"""Checkpoints that a node has for itself: in its memory, in a neighbour's, on its own disk."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Sequence

import ckpt
from ckpt import CheckpointError, Location, Manifest, Tier
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.log import complain, say
from pretrain.state import Progress

_RUN = "run.json"
_NO_STEP = 1 << 62
_SAVE_ID = re.compile(r"(\d{8,})-[0-9a-f]{16}")


def name_run(job: Job) -> str:
    """What tells this run from others that were in the same place: a name that the shared folder
    keeps as long as it is there. What nodes have of another run is not this one's. Every rank must
    call.

    Raises InputError where the folder has a name that cannot be read.
    """
    numbers: list[int] = []
    job.runtime.first(lambda: numbers.append(_read_name(job)))
    return f"{job.runtime.broadcast(numbers[0] if numbers else 0):016x}"


def _read_name(job: Job) -> int:
    root = job.spec.checkpoint_path
    store = ckpt.open_store(root)
    if _RUN not in store.names(""):
        with contextlib.suppress(FileExistsError):
            store.publish(_RUN, json.dumps({"run_id": f"{secrets.randbits(62):016x}"}).encode())
    try:
        return int(json.loads(store.read(_RUN))["run_id"], 16) % _NO_STEP
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"checkpoint.path ({root}) must have a readable {_RUN} ({error}); without one, what "
            f"nodes alone have is passed over"
        ) from None


def forget_run(location: Location) -> None:
    """Let the next start in a place be of another run."""
    ckpt.open_store(location).remove(_RUN)


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
    ones that are never passed over. Not taken, and forgotten, are those of another run, and those
    of steps whose manifest somebody has moved away from the shared folder, and later ones.

    Args:
        job: what is filled.
        tiers: those of nodes, the fastest first.
        shared_step: the newest in the shared folder, or -1.
        run_id: see :func:`name_run`.
        load: fills the job from a manifest in a tier.
    """
    runtime = job.runtime
    end = _first_moved_away(job, shared_step)

    def is_ours(manifest: Manifest) -> bool:
        return manifest.state.get("run_id") == run_id and manifest.step < end

    own = [tier for tier in tiers if tier.writers[0] == runtime.rank]
    for tier in own:
        _try_tier(job, tier, ckpt.remove_uncommitted)
    runtime.agree(True)
    found = [
        (tier, manifest)
        for tier in tiers
        for manifest in ckpt.reachable(tier.location, job.topology, runtime.rank)
        if is_ours(manifest)
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
    after = shared_step if progress is None else progress.step
    for tier in own:
        _try_tier(
            job, tier, lambda where: ckpt.forget(where, lambda m: m.step > after or not is_ours(m))
        )
    return progress


def _first_moved_away(job: Job, shared_step: int) -> int:
    """The first step after ``shared_step`` whose objects the shared folder has, and no manifest:
    somebody wants the run to go back."""
    steps: list[int] = []

    def look() -> None:
        names = map(_SAVE_ID.fullmatch, ckpt.unlisted_saves(job.spec.checkpoint_path))
        steps.extend(int(name[1]) for name in names if name)

    job.runtime.first(look)
    end = min((step for step in steps if step > shared_step), default=_NO_STEP)
    end = job.runtime.broadcast(end)
    if end < _NO_STEP and job.runtime.is_first:
        say(f"the manifest of step {end} was moved away; nodes' checkpoints go back with it")
    return end


def _try_tier(job: Job, tier: Tier, act: Callable[[str], object]) -> None:
    """A node's tier that cannot be reached is told, and passed over."""
    try:
        act(tier.location)
    except (CheckpointError, OSError) as error:
        complain(f"rank {job.runtime.rank}: tier {tier.name} cannot be used: {error}")
