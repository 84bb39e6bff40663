"""Initial weights of a run: random, or from another checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ckpt
from ckpt import CheckpointError, LocalArray, Location, Manifest
from ckpt.format import Missing, renamed
from corpus.config import DataConfig
from pretrain.data import Blend, Corpora
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.optim import set_update_count
from pretrain.spec import JobSpec, stored_spec
from pretrain.state import Progress, RunState, blend_of, read_run_state, seed_rng
from pretrain.tune import is_adapter


def initialize(job: Job) -> Progress:
    """Initialize the model of a new run: at random, or with the weights of ``init.checkpoint``.

    Every rank must call. Raises InputError or CheckpointError where the weights cannot be had.
    """
    spec, runtime = job.spec, job.runtime
    progress = Progress(loss_scale=spec.precision.first_loss_scale)
    if spec.init.checkpoint is None:
        job.initialize()
        if spec.tune is not None:
            text = "without init.checkpoint what [tune] freezes has random values"
            job.events.note(text, problem=True)
    else:
        progress = _load_initial(job, spec.init.checkpoint, progress)
    seed_rng(spec.train.seed, progress.step, runtime.rank)
    return progress


def _load_initial(job: Job, checkpoint: str, progress: Progress) -> Progress:
    spec, runtime = job.spec, job.runtime
    root, step = runtime.together(lambda: _located(checkpoint))
    manifest = runtime.together(lambda: ckpt.read_manifest(root, step))
    tokenizer = job.corpora.tokenizer_fingerprint
    runtime.together(lambda: _check_tokenizer(spec.data, tokenizer, root, manifest))
    goes_on = spec.init.state == "training"
    if goes_on:
        state = runtime.together(lambda: read_run_state(manifest))
        progress = runtime.together(lambda: _progress_of(spec, root, manifest, state, progress))
    named = job.arrays() if goes_on else job.weights()
    arrays = [array for array in named if not is_adapter(array.spec.name)]
    missing: Missing = "refuse" if spec.init.strict or goes_on else "keep"
    if missing == "keep" or spec.tune is not None:
        job.initialize()  # of adapters a checkpoint to begin with has none
    rename = spec.init.rename
    kept = runtime.together(lambda: _load_weights(root, manifest, arrays, rename, missing))
    for name in kept:
        job.events.note(f"{name} is not in init.checkpoint and is initialized at random")
    what = "the training goes on from" if goes_on else "initial weights are those of"
    job.events.note(f"{what} step {manifest.step} in {root}")
    if goes_on:
        set_update_count(job.optimizer, progress.step)
        progress = job.continue_step_counts(progress)
        if state is not None and _same_data(manifest, blend_of(state), job.corpora):
            job.continue_blend(blend_of(state), progress.consumed_samples)
        elif state is not None:
            job.events.note("the data is not that of init.checkpoint: samples begin anew")
            progress = replace(progress, consumed_samples=0, first_sample=0)
    saved = stored_spec(manifest.spec)
    for section in ("model", "moe"):
        before, now = saved.get(section), spec.as_dict()[section]
        for field, was, here in ckpt.lifecycle.spec_differences(before, now, section):
            job.events.note(
                f"spec differs from that of init.checkpoint: {field} was {was}, is {here}"
            )
    return progress


def _same_data(manifest: Manifest, blend: Blend, corpora: Corpora) -> bool:
    """Whether a run has the sequences that a checkpoint's own run has drawn from."""
    before: Mapping[str, Any] = stored_spec(manifest.spec).get("data") or {}
    now = corpora.data.model_dump(mode="json")
    known = {corpus.manifest.fingerprint for corpus in corpora.sources}
    alike = all(before.get(name) == now[name] for name in ("seq_len", "packing"))
    return alike and set(blend.sources) <= known


def _progress_of(
    spec: JobSpec, root: Location, manifest: Manifest, state: RunState | None, progress: Progress
) -> Progress:
    """Where the training of a checkpoint is: of a run's own, or of one that was another trainer's,
    which has no ``state``.

    Raises InputError for weights alone, and where the run would have no step.
    """
    if manifest.step >= spec.train.steps:
        raise InputError(
            f"train.steps ({spec.train.steps}) must be above the step of init.checkpoint "
            f"({manifest.step}) with init.state (training)"
        )
    if state is None:
        moved = manifest.state.get("training") or {}
        steps, updates = moved.get("step"), moved.get("updates")
        tokens, samples, counts = moved.get("tokens") or 0, moved.get("samples") or 0, None
    else:
        there, steps, updates = state.progress, manifest.step, manifest.step
        tokens, samples, counts = there.tokens_seen, there.consumed_samples, there.expert_counts
    if updates is None or updates != steps:
        raise InputError(
            f"init.state (training) needs a checkpoint with moments of its step, and {root} has "
            f"{'weights alone' if updates is None else f'moments of {updates} updates'} at step "
            f"{manifest.step}; set init.state to weights"
        )
    return replace(
        progress,
        step=manifest.step,
        tokens_seen=tokens,
        consumed_samples=samples,
        expert_counts=counts,
        first_step=manifest.step,
        first_sample=samples,
    )


def _check_tokenizer(
    data: DataConfig, fingerprint: str, root: Location, manifest: Manifest
) -> None:
    """Token ids mean nothing to weights that were trained with another tokenizer."""
    saved = manifest.state.get("tokenizer")
    if saved == "" and data.tokenizer is None:
        raise InputError(
            f"init.checkpoint ({root}) does not know the tokenizer of its weights: name its "
            f"tokenizer.json in data.tokenizer"
        )
    if saved and saved != fingerprint:
        raise InputError(
            f"init.checkpoint ({root}) has weights of another tokenizer than that of data.path "
            f"({data.first.path}): name their tokenizer.json in data.tokenizer, and a new data.path"
        )


def _located(checkpoint: str) -> tuple[Location, int | None]:
    """The folder, and the step where ``checkpoint`` is the path of a manifest."""
    try:
        return ckpt.format.locate(checkpoint)
    except ValueError as error:
        raise InputError(f"init.checkpoint ({checkpoint}): {error}") from None


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
        if stray and is_adapter(stray[0]):
            raise CheckpointError(
                "checkpoint has adapters: merge them by convoy convert export and import"
            )
        if stray:
            raise CheckpointError(f"checkpoint array {stray[0]} has no place in the model")
        return ckpt.load(root, manifest, arrays, rename, missing, extra="ignore")
    except CheckpointError as error:
        raise CheckpointError(f"init.checkpoint ({root}): {error}") from None
