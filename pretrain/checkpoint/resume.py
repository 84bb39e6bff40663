"""What a start makes of the checkpoints that there are."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ValidationError

import ckpt
from ckpt import ArraySpec, CheckpointError, LocalArray, Location, Manifest, Tier
from ckpt.format import objects_key
from corpus.config import is_remote
from parallel import Topology
from parallel.crossing import across
from pretrain.checkpoint.compatible import check_resumable, resolved
from pretrain.checkpoint.initial_weights import initialize
from pretrain.checkpoint.node_tiers import NodeTiers
from pretrain.checkpoint.progress import newest_shared_step
from pretrain.checkpoint.rolling_back import complete_roll_back, with_memory_of_roll_back
from pretrain.checkpoint.run_id import run_id, save_id
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.observe import Events, Resized, Restored, SpecChanged, human_bytes
from pretrain.optim import set_update_count
from pretrain.spec import JobSpec, is_learning_rate_jump, learning_rate
from pretrain.state import (
    Progress,
    blend_of,
    read_run_state,
    rng_arrays,
    rng_states,
    seed_rng,
    set_rng_states,
)

T = TypeVar("T")


def restore(job: Job, tiers: Sequence[Tier] = ()) -> Progress:
    """Load the newest checkpoint that every rank can reach; without one, initialize the weights.

    Every rank must call.

    Args:
        job: what to fill.
        tiers: where checkpoints may be besides the shared folder, the fastest first. A checkpoint
            in a node-local tier is taken where its step is at least the shared folder's newest.
            Newer checkpoints that only some ranks have are removed from the node-local tiers.

    Returns:
        The counters of the checkpoint.

    Raises:
        InputError: where the checkpoint is of another model, data or batch, or of another
            topology and ``checkpoint.reshard_on_load`` is false.
        CheckpointError: where it is not whole.
    """
    spec, runtime, began = job.spec, job.runtime, time.perf_counter()
    root, events = spec.checkpoint_path, job.events
    longest_id = save_id(runtime.launch_id, spec.train.steps, go_backs=1000)
    arrays = [array.spec for array in (*job.arrays(), *job.residuals())]
    runtime.together(lambda: _check_paths(tiers, longest_id, arrays))
    runtime.first(lambda: _ready_folder(root, arrays))
    runtime.first(lambda: complete_roll_back(root, events.note))
    run = run_id(runtime, root)
    step = newest_shared_step(runtime, root)
    own = [tier for tier in tiers if tier.ranks is not None]
    nodes = NodeTiers(own, run, topology=job.topology, runtime=runtime, events=events)
    loaded = None
    if own:
        load = partial(_load_resumable, job)
        loaded = nodes.restore(load, step, root=root, began=began)
    if loaded is None and step >= 0:
        loaded = _restore_shared(job, step, began)
    if loaded is None:
        progress = initialize(job)
    else:
        progress, manifest = loaded
        _publish_changes(events, spec, manifest)
        progress = _count_resize(events, job.topology, progress, manifest)
    nodes.forget_others(progress.step)
    progress = replace(progress, run_id=run)
    return runtime.together(lambda: with_memory_of_roll_back(root, progress))


def load_step(job: Job, root: Location, manifest: Manifest) -> Progress:
    """Fill a job from one checkpoint, and change nothing else; every rank must call.

    Raises InputError and CheckpointError as :func:`restore` does.
    """
    job.runtime.together(lambda: check_resumable(job, manifest))
    return job.runtime.together(lambda: _load(job, manifest, root))


def saved_spec(manifest: Manifest) -> dict[str, Any]:
    """The spec that a checkpoint holds, in this version's terms."""
    return resolved(manifest.spec)


def _load_resumable(job: Job, manifest: Manifest, root: Location) -> Progress:
    check_resumable(job, manifest)
    return _load(job, manifest, root)


def _restore_shared(job: Job, step: int, began: float) -> tuple[Progress, Manifest]:
    runtime, root = job.runtime, job.spec.checkpoint_path
    read = partial(ckpt.read_manifest, root, step)
    manifest = runtime.together(lambda: _or_way_back(root, step, read))
    runtime.together(lambda: check_resumable(job, manifest))
    once = _read_once(root) and job.topology.dp_replicate > 1
    load = partial(_load, job, manifest, root, once)
    progress = runtime.together(lambda: _or_way_back(root, step, load))
    if once:
        _spread(job.arrays(), job.dims.replicate_group, runtime.device)
    seconds = time.perf_counter() - began
    job.events.publish(Restored(step=step, tier="shared", seconds=seconds))
    return progress, manifest


def _publish_changes(events: Events, spec: JobSpec, manifest: Manifest) -> None:
    """Publish in what the spec differs from that of a checkpoint, and a jump of the learning rate
    that follows from the differences."""
    saved, step = resolved(manifest.spec), manifest.step
    for field, before, now in ckpt.lifecycle.spec_differences(saved, spec.as_dict()):
        events.publish(SpecChanged(step=step, field=field, before=before, now=now))
    if step >= spec.train.steps:
        return
    try:
        before = learning_rate(JobSpec.model_validate(saved), step)
    except ValidationError:
        return  # the saved spec breaks a rule of this version
    now = learning_rate(spec, step)
    if is_learning_rate_jump(before, now):
        text = (
            f"learning rate jumps: step {step + 1} has {now:.2e}, and would have {before:.2e} with "
            f"the spec of the checkpoint"
        )
        events.note(text, step=step)


def _count_resize(
    events: Events, topology: Topology, progress: Progress, manifest: Manifest
) -> Progress:
    """The progress in the next topology epoch, where the checkpoint is of another layout."""
    before = Topology(**manifest.topology)
    if before == topology:
        return progress
    epoch = progress.topology_epoch + 1
    events.publish(
        Resized(
            step=manifest.step,
            epoch=epoch,
            before=before.as_dict(),
            after=topology.as_dict(),
            save_id=manifest.save_id,
        )
    )
    return replace(progress, topology_epoch=epoch)


def _or_way_back(root: Location, step: int, act: Callable[[], T]) -> T:
    """Name the older checkpoint where this one is damaged; a person decides to take it."""
    try:
        return act()
    except CheckpointError as error:
        before = [s for s in ckpt.committed_steps(root) if s < step]
        if not before:
            raise
        raise CheckpointError(
            f"{error}; to go back, run `convoy prepare` with the SPEC and all --set words of this "
            f"run, and with --load-step {before[-1]}"
        ) from None


def _read_once(root: Location) -> bool:
    """Whether one replica of the model reads for all: an object store is slower than the network
    between ranks, and a request has a price."""
    return is_remote(str(root))


def _spread(arrays: Sequence[LocalArray], group: dist.ProcessGroup, device: torch.device) -> None:
    """Let the first replica of the model broadcast what it has read to the other replicas."""
    for array in arrays:
        for piece in array.pieces:
            # What is offloaded is on the host, and NCCL broadcasts on the device only.
            sent = piece.detach().to(device).contiguous()
            begin = partial(dist.broadcast, sent, group=group, group_src=0, async_op=True)
            across(group, begin).wait()
            if sent.data_ptr() != piece.data_ptr():
                piece.detach().copy_(sent)


def _load(job: Job, manifest: Manifest, root: Location, once: bool = False) -> Progress:
    """Fill the job from a manifest; with ``once`` only on ranks of the first replica."""
    runtime, state = job.runtime, read_run_state(manifest)
    assert state is not None, "check_resumable refuses weights"
    arrays = job.arrays()
    states = rng_states(runtime.device)
    own_rng = rng_arrays(job.topology, runtime.rank, runtime.device, states)
    same_ranks = manifest.topology == job.topology.as_dict() and _alike(manifest, "rng/", own_rng)
    if same_ranks:
        arrays += own_rng
    owed = job.residuals()
    if owed and same_ranks and _alike(manifest, "residual/", owed):
        arrays += owed
    elif _saved(manifest, "residual/"):
        why = "the spec asks for no compression" if same_ranks else "they are of another layout"
        text = f"the error-feedback buffers of compressed gradients are dropped: {why}"
        job.events.note(text, step=manifest.step)
    of_ranks = _saved(manifest, "rng/") | _saved(manifest, "residual/")
    names = {array.spec.name for array in arrays} | set(of_ranks)
    stray = sorted(a.name for a in manifest.arrays if a.name not in names)
    if stray:
        raise CheckpointError(f"checkpoint array {stray[0]} has no place in the model")
    if once and job.topology.place(job.runtime.rank).dp_replicate:
        of_model = {array.spec.name for array in job.arrays()}
        arrays = [array for array in arrays if array.spec.name not in of_model]
    ckpt.load(root, manifest, arrays, extra="ignore")  # what is left out has been named above
    if same_ranks:
        set_rng_states(states, runtime.device)
    else:
        seed_rng(job.spec.train.seed, manifest.step, runtime.rank)
    # Speeds are of machines: on other machines they are measured anew, from equal shares.
    same_machines = same_ranks and state.machines == list(job.machines)
    same_topology = manifest.topology == job.topology.as_dict()
    for part in job.parts:
        if part.name in state.parts and (same_machines if part.of_machines else same_topology):
            wish = part.load(state.parts[part.name])
            if wish is not None:
                job.act(wish)
    progress, scale = state.progress, job.spec.precision.first_loss_scale
    job.continue_blend(blend_of(state), progress.consumed_samples)
    progress = job.continue_step_counts(progress)
    if scale is None or progress.loss_scale is None:
        # One of the two runs is not in float16: the loss scale begins anew.
        progress = replace(progress, loss_scale=scale, steps_at_loss_scale=0)
    set_update_count(job.optimizer, progress.step)
    return progress


def _saved(manifest: Manifest, prefix: str) -> dict[str, tuple[int, ...]]:
    return {a.name: a.shape for a in manifest.arrays if a.name.startswith(prefix)}


def _alike(manifest: Manifest, prefix: str, arrays: list[LocalArray]) -> bool:
    """Whether the checkpoint has exactly these arrays under ``prefix``. A resharded checkpoint has
    a row for each rank that it was saved on, as before."""
    return _saved(manifest, prefix) == {a.spec.name: a.spec.shape for a in arrays}


def _check_paths(tiers: Sequence[Tier], save_id: str, arrays: Sequence[ArraySpec]) -> None:
    """Refuse a folder that is so deep that the system takes no paths of objects in it."""
    longest = max(
        (
            f"{objects_key(save_id)}/{array.name}/c." + ".".join(map(str, array.shape))
            for array in arrays
        ),
        key=lambda key: len(os.fsencode(key)),
    )
    for tier in tiers:
        store = ckpt.open_store(tier.location)
        if not isinstance(store, ckpt.LocalStore):
            continue
        try:
            Path(store.where(longest)).lstat()
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                field = "path" if tier.name == "shared" else f"tiers.{tier.name}"
                raise InputError(
                    f"checkpoint.{field} ({store.where()[:40]}...) must be a shorter path: it has "
                    f"{len(os.fsencode(store.where()))} bytes, and names of objects add up to "
                    f"{len(os.fsencode(longest)) + 1}"
                ) from None


def _ready_folder(root: Location, arrays: Sequence[ArraySpec]) -> None:
    """Remove uncommitted saves, and check that a commit works and that a save will fit."""
    store = ckpt.open_store(root)
    try:
        ckpt.lifecycle.remove_uncommitted(store)
        # A commit needs what not every store has; better to know now.
        store.remove(".probe")
        store.publish(".probe", b"")
        store.remove(".probe")
    except OSError as error:
        raise InputError(f"checkpoint.path ({root}) cannot be written: {error.strerror}") from None
    needed = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    free = store.free_bytes()
    if free is not None and needed > free:
        raise InputError(
            f"checkpoint.path ({root}) must have room for one checkpoint ({human_bytes(needed)}); "
            f"it has {human_bytes(free)}"
        )
