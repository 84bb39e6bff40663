"""A run's checkpoints: what is saved, and what a start makes of what there is."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from pydantic import ValidationError

import ckpt
from ckpt import CheckpointError, LocalArray, Location, Manifest, SaveInfo, Tier
from ckpt.names import Missing, renamed
from parallel import Topology
from pretrain.errors import InputError
from pretrain.init import init_parameters
from pretrain.job import Job
from pretrain.log import human_bytes, say
from pretrain.nodes import forget_others, name_run, restore_from_nodes
from pretrain.optim import set_update_count
from pretrain.spec import JobSpec
from pretrain.state import Progress, rng_arrays, rng_states, seed_rng, set_rng_states

T = TypeVar("T")

# A resume under another value of these would not be the same run.
_FIXED = ("model", "moe", "data.seq_len", "data.shard_tokens", "data.document_mask",
          "train.global_batch_size", "train.ramp_batch_size", "train.ramp_tokens",
          "train.seed")  # fmt: skip
_FREE = (
    "moe.backend", "moe.input_jitter", "moe.bias_update_rate", "moe.load_balance_weight",
    "moe.sequence_balance_weight", "moe.z_loss_weight", "moe.load_balance_scope",
    "moe.dispatcher", "moe.dispatch_chunks", "moe.max_tokens", "moe.recompute_experts",
    "moe.capacity_smoothing", "moe.capacity_hysteresis",
)  # fmt: skip


def checkpoint_arrays(job: Job) -> list[LocalArray]:
    """This rank's part of what a checkpoint holds, as it is now."""
    rng = rng_arrays(job.topology, job.runtime.rank, job.runtime.device)
    return [*job.arrays(), *job.residuals(), *rng]


def save_info(job: Job, progress: Progress) -> SaveInfo:
    """What else a checkpoint after ``progress.step`` steps holds."""
    spec, runtime = job.spec, job.runtime
    return SaveInfo(
        save_id=f"{progress.step:08d}-{runtime.launch_id}",
        step=progress.step,
        topology=job.topology,
        state={
            **progress.as_dict(),
            "corpus": job.corpus.fingerprint,
            "capacity": None if job.balance is None else job.balance.state(),
        },
        spec=spec.as_dict(),
        spec_hash=spec.hash,
        compression=spec.checkpoint.compression,
    )


def save_checkpoint(job: Job, progress: Progress) -> Manifest | None:
    """Commit the state as it is after ``progress.step`` steps, while every rank waits.

    Raises CheckpointError on every rank where any could not write.
    """
    root, arrays = job.spec.checkpoint_path, checkpoint_arrays(job)
    return ckpt.save(root, save_info(job, progress), arrays, job.runtime.rank, job.runtime.agree)


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
        progress = _restore_shared(job, step) if step >= 0 else _first_values(job)
    forget_others(job, own, run_id, progress.step)
    return replace(progress, run_id=run_id)


def _load_resumable(job: Job, manifest: Manifest, root: Location) -> Progress:
    _check_resumable(job, manifest)
    return _load(job, manifest, root)


def _restore_shared(job: Job, step: int) -> Progress:
    spec, runtime, root = job.spec, job.runtime, job.spec.checkpoint_path
    read = partial(ckpt.read_manifest, root, step)
    manifest = runtime.together(lambda: _or_way_back(root, step, read))
    runtime.together(lambda: _check_resumable(job, manifest))
    once = spec.checkpoint.read_once and job.topology.dp_replicate > 1
    load = partial(_load, job, manifest, root, once)
    progress = runtime.together(lambda: _or_way_back(root, step, load))
    if once:
        _spread(job)
    if runtime.is_first:
        for field, before, now in ckpt.spec_differences(_resolved(manifest.spec), spec.as_dict()):
            say(f"spec changed since step {step}: {field} was {before}, is {now}")
    return progress


def newest_shared_step(job: Job) -> int:
    """The newest step that all ranks share, or -1; every rank must call."""
    steps: list[int] = []
    job.runtime.first(lambda: steps.extend(ckpt.committed_steps(job.spec.checkpoint_path)))
    return job.runtime.broadcast(steps[-1] if steps else -1)


def _first_values(job: Job) -> Progress:
    spec, runtime = job.spec, job.runtime
    if spec.train.init_from is None:
        _fresh_parameters(job)
    else:
        _first_weights(job, spec.train.init_from)
    seed_rng(spec.train.seed, 0, runtime.rank)
    return Progress(loss_scale=spec.train.first_loss_scale)


def _first_weights(job: Job, init_from: str) -> None:
    spec, runtime = job.spec, job.runtime
    root = runtime.together(lambda: _as_location(init_from))
    manifest = runtime.together(lambda: ckpt.read_manifest(root))
    arrays = [array for array in job.arrays() if array.spec.name.startswith("model/")]
    if spec.train.init_missing == "keep":
        _fresh_parameters(job)
    rename, missing = spec.train.init_rename, spec.train.init_missing
    kept = runtime.together(lambda: _load_weights(root, manifest, arrays, rename, missing))
    if runtime.is_first:
        for name in kept:
            say(f"{name} is not in train.init_from and gets fresh values")
        say(f"first values are the weights of step {manifest.step} in {root}")
        for section in ("model", "moe"):
            before, now = manifest.spec.get(section), spec.as_dict()[section]
            for field, was, here in ckpt.spec_differences(before, now, section):
                say(f"spec differs from that of train.init_from: {field} was {was}, is {here}")


def _fresh_parameters(job: Job) -> None:
    seed, layers = job.spec.train.seed, job.spec.model.num_layers
    init_parameters(job.model, job.layouts, job.runtime.rank, seed, layers)


def _as_location(init_from: str) -> Location:
    try:
        return ckpt.as_location(init_from)
    except ValueError as error:
        raise InputError(f"train.init_from ({init_from}): {error}") from None


def _load_weights(
    root: Location,
    manifest: Manifest,
    arrays: list[LocalArray],
    rename: Mapping[str, str],
    missing: Missing,
) -> list[str]:
    names = {array.spec.name for array in arrays}
    try:
        saved = renamed([a.name for a in manifest.arrays], rename)
        stray = sorted(n for n in saved if n.startswith("model/") and n not in names)
        if stray:
            raise CheckpointError(f"checkpoint array {stray[0]} has no place in the model")
        return ckpt.load(root, manifest, arrays, rename, missing)
    except CheckpointError as error:
        raise CheckpointError(f"train.init_from ({root}): {error}") from None


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


def _check_resumable(job: Job, manifest: Manifest) -> None:
    root, spec = job.spec.checkpoint_path, job.spec
    where = f"the checkpoint of step {manifest.step} in {root}"
    if "corpus" not in manifest.state:
        raise InputError(
            f"checkpoint.path ({root}) must be the run's own: {where} holds weights alone; name it "
            f"in train.init_from"
        )
    for field, before, now in ckpt.spec_differences(_resolved(manifest.spec), spec.as_dict()):
        if field not in _FREE and any(field == f or field.startswith(f"{f}.") for f in _FIXED):
            raise InputError(
                f"{field} ({now}) must be as in {where} ({before}); start over elsewhere, or put "
                f"it back"
            )
    if manifest.state["corpus"] != job.corpus.fingerprint:
        raise InputError(
            f"data.path ({spec.data.path}) must hold the corpus of {where}; its tokens are others"
        )
    if manifest.topology != job.topology.as_dict() and (
        spec.checkpoint.on_topology_change == "abort"
    ):
        raise InputError(
            f"topology ({job.topology.describe()}) must be that of {where} "
            f"({Topology(**manifest.topology).describe()}), or "
            f'checkpoint.on_topology_change must be "reshard"'
        )


def _resolved(saved: dict[str, Any]) -> dict[str, Any]:
    """A spec that was saved, with today's defaults for fields that there were not then, and without
    those that there are no more."""
    try:
        return JobSpec.model_validate(saved).as_dict()
    except ValidationError as error:
        gone = [e["loc"] for e in error.errors() if e["type"] == "extra_forbidden"]
    kept = copy.deepcopy(saved)
    for *sections, field in gone:
        section = kept
        for name in sections:
            section = section[str(name)]
        del section[str(field)]
    return _resolved(kept) if gone else saved
