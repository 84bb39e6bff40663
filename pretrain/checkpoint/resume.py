"""A run's checkpoints: what is saved, and what a start makes of what there is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch.distributed as dist

import ckpt
from ckpt import CheckpointError, LocalArray, Location, Manifest, Tier
from pretrain.checkpoint.compatible import check_resumable, resolved
from pretrain.checkpoint.initial_weights import first_values
from pretrain.checkpoint.node_tiers import forget_others, restore_from_nodes
from pretrain.checkpoint.run_id import name_run
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.observe import human_bytes, say
from pretrain.optim import set_update_count
from pretrain.state import Progress, rng_arrays, rng_states, seed_rng, set_rng_states

T = TypeVar("T")


def restore(job: Job, tiers: Sequence[Tier] = ()) -> Progress:
    """Load the newest checkpoint that every rank can reach, or where there is none give parameters
    their first values: fresh ones, or the weights of ``train.init_from``.

    Args:
        job: what to fill.
        tiers: where checkpoints may be besides the shared folder, the fastest first. Those of
            nodes are taken where they are newer, or as new; later ones that not every rank has
            are forgotten.

    Raises:
        InputError: where the checkpoint is of another model, data or batch, or of another
            topology and the spec does not say ``on_topology_change = "reshard"``.
        CheckpointError: where it is not whole.
    """
    runtime = job.runtime
    runtime.first(lambda: _ready_folder(job))
    run_id = name_run(job)
    step = newest_shared_step(job)
    own = [tier for tier in tiers if tier.ranks is not None]
    progress = None
    if own:
        progress = restore_from_nodes(job, own, step, run_id, partial(_load_resumable, job))
    if progress is None:
        progress = _restore_shared(job, step) if step >= 0 else first_values(job)
    forget_others(job, own, run_id, progress.step)
    return replace(progress, run_id=run_id)


def _load_resumable(job: Job, manifest: Manifest, root: Location) -> Progress:
    check_resumable(job, manifest)
    return _load(job, manifest, root)


def _restore_shared(job: Job, step: int) -> Progress:
    spec, runtime, root = job.spec, job.runtime, job.spec.checkpoint_path
    read = partial(ckpt.read_manifest, root, step)
    manifest = runtime.together(lambda: _or_way_back(root, step, read))
    runtime.together(lambda: check_resumable(job, manifest))
    once = spec.checkpoint.read_once and job.topology.dp_replicate > 1
    load = partial(_load, job, manifest, root, once)
    progress = runtime.together(lambda: _or_way_back(root, step, load))
    if once:
        _spread(job)
    if runtime.is_first:
        for field, before, now in ckpt.spec_differences(resolved(manifest.spec), spec.as_dict()):
            say(f"spec changed since step {step}: {field} was {before}, is {now}")
    return progress


def newest_shared_step(job: Job) -> int:
    """The newest step that all ranks share, or -1; every rank must call."""
    steps: list[int] = []
    job.runtime.first(lambda: steps.extend(ckpt.committed_steps(job.spec.checkpoint_path)))
    return job.runtime.broadcast(steps[-1] if steps else -1)


def _or_way_back(root: Location, step: int, act: Callable[[], T]) -> T:
    """A damaged checkpoint is never passed over silently; the one before is for people to take."""
    try:
        return act()
    except CheckpointError as error:
        before = [s for s in ckpt.committed_steps(root) if s < step]
        if not before:
            raise
        raise CheckpointError(
            f"{error}; to go back, start once with --prepare --back-to {before[-1]}"
        ) from None


def _spread(job: Job) -> None:
    """Let the first copy of the model give the others what it has read."""
    group = job.dims.replicate_mesh.get_group()
    source = dist.get_global_rank(group, 0)
    for array in job.arrays():
        for piece in array.pieces:
            sent = piece.detach().contiguous()
            dist.broadcast(sent, source, group=group)
            if sent.data_ptr() != piece.data_ptr():
                piece.detach().copy_(sent)


def _load(job: Job, manifest: Manifest, root: Location, once: bool = False) -> Progress:
    """Fill the job; with ``once`` only where this rank is of the first copy of the model."""
    runtime = job.runtime
    arrays = job.arrays()
    states = rng_states(runtime.device)
    own_rng = rng_arrays(job.topology, runtime.rank, runtime.device, states)
    same_ranks = manifest.topology == job.topology.as_dict() and _alike(manifest, "rng/", own_rng)
    if same_ranks:
        arrays += own_rng
    owed = job.residuals()
    if owed and same_ranks and _alike(manifest, "residual/", owed):
        arrays += owed
    elif _saved(manifest, "residual/") and runtime.is_first:
        why = "is asked for no more" if same_ranks else "was of other ranks"
        say(f"what compressed gradients still owed {why}, and is left out")
    of_ranks = _saved(manifest, "rng/") | _saved(manifest, "residual/")
    names = {array.spec.name for array in arrays} | set(of_ranks)
    stray = sorted(a.name for a in manifest.arrays if a.name not in names)
    if stray:
        raise CheckpointError(f"checkpoint array {stray[0]} has no place in the model")
    if once and job.dims.replicate_mesh.get_local_rank():
        of_model = {array.spec.name for array in job.arrays()}
        arrays = [array for array in arrays if array.spec.name not in of_model]
    ckpt.load(root, manifest, arrays)
    if same_ranks:
        set_rng_states(states, runtime.device)
    else:
        seed_rng(job.spec.train.seed, manifest.step, runtime.rank)
    # Speeds are of machines: on other ranks they are measured anew, from equal shares.
    if job.balance is not None and same_ranks and manifest.state.get("capacity"):
        job.balance.load(manifest.state["capacity"])
        job.balance.apply(job.routers, runtime.rank)
    values = {k: v for k, v in manifest.state.items() if k not in ("corpus", "capacity")}
    scale = job.spec.train.first_loss_scale
    if scale is None or values.get("loss_scale") is None:
        # One of the two runs is not in float16: nothing is to be gone on with.
        values |= {"loss_scale": scale, "steps_at_loss_scale": 0}
    progress = replace(Progress(), **values)
    set_update_count(job.optimizer, progress.step)
    return progress


def _saved(manifest: Manifest, prefix: str) -> dict[str, tuple[int, ...]]:
    return {a.name: a.shape for a in manifest.arrays if a.name.startswith(prefix)}


def _alike(manifest: Manifest, prefix: str, arrays: list[LocalArray]) -> bool:
    """Whether just these were saved. A checkpoint that was resharded still has a row for each rank
    that it was saved on."""
    return _saved(manifest, prefix) == {a.spec.name: a.spec.shape for a in arrays}


def _ready_folder(job: Job) -> None:
    """Remove leftovers, and see that a save will fit."""
    root = job.spec.checkpoint_path
    store = ckpt.open_store(root)
    try:
        ckpt.remove_uncommitted(store)
        # A commit needs what not every store has; better to know now.
        store.remove(".probe")
        store.publish(".probe", b"")
        store.remove(".probe")
    except OSError as error:
        raise InputError(f"checkpoint.path ({root}) cannot be written: {error.strerror}") from None
    specs = [array.spec for array in (*job.arrays(), *job.residuals())]
    needed = sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)
    free = store.free_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"checkpoint.path ({root}) must have room for one checkpoint ({human_bytes(needed)}); "
            f"it has {human_bytes(free)}"
        )
