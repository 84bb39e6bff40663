"""Checkpoints that a node has for itself: in its memory, in a neighbour's, on its own disk."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Callable, Sequence
from functools import partial

import ckpt
from ckpt import CheckpointError, Location, Manifest, Store, Tier
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.log import complain, say
from pretrain.state import Progress

_RUN = "run.json"
_NO_NAME = 1 << 62


def name_run(job: Job) -> str:
    """What tells this run from others that were in the same place: a name that the shared folder
    keeps as long as it is there, or else its newest checkpoint has. What nodes have of another run
    is not this one's. Every rank must call.

    Raises InputError where the folder has a name that cannot be read.
    """
    numbers: list[int] = []
    job.runtime.first(lambda: numbers.append(_read_name(job)))
    return f"{job.runtime.broadcast(numbers[0] if numbers else 0):016x}"


def _read_name(job: Job) -> int:
    root = job.spec.checkpoint_path
    store = ckpt.open_store(root)
    try:
        if _RUN not in store.names(""):
            newest = None
            with contextlib.suppress(CheckpointError):
                newest = ckpt.read_manifest(store).state.get("run_id")
            _write_name(store, newest or _new_name())
        return int(json.loads(store.read(_RUN))["run_id"], 16) % _NO_NAME
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"checkpoint.path ({root}) must have a {_RUN} that can be read ({error}); where it is "
            f"removed, the newest checkpoint has the run's name too"
        ) from None


def _new_name() -> str:
    return f"{secrets.randbits(62):016x}"


def _write_name(store: Store, name: str) -> None:
    with contextlib.suppress(FileExistsError):
        store.publish(_RUN, json.dumps({"run_id": name}).encode())


def forget_run(location: Location) -> None:
    """Let the next start in a place be of another run. Raises OSError."""
    store = ckpt.open_store(location)
    store.remove(_RUN)
    for name in ("manifests", "objects", "away"):
        store.remove_all(name)


def go_back(location: Location, step: int) -> None:
    """Let the next start go on from ``step``: move the manifests of later ones to ``away/``, where
    nothing looks for them, and give the run another name, so that what nodes have is not taken.

    Raises InputError where there is no such step; OSError.
    """
    store = ckpt.open_store(location)
    steps = ckpt.committed_steps(store)
    if step not in steps:
        found = ", ".join(map(str, steps)) or "there is none"
        raise InputError(f"--back-to ({step}) must be a step that {store.where()} has: {found}")
    name = _new_name()
    store.remove(_RUN)
    _write_name(store, name)
    for later in reversed([s for s in steps if s > step]):
        key = ckpt.manifest_key(later)
        store.publish(f"away/{name}/{key.rpartition('/')[2]}", store.read(key))
        store.remove(key)
        say(f"step {later} is in {store.where(f'away/{name}')} now; its objects are left")


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
