"""Initial weights of a run: random, or from another checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import ckpt
from ckpt import CheckpointError, LocalArray, Location, Manifest
from ckpt.format import Missing, renamed
from corpus.config import DataConfig
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.spec import stored_spec
from pretrain.state import Progress, seed_rng
from pretrain.tune import is_adapter


def initialize(job: Job) -> Progress:
    """Initialize the model of a new run: at random, or with the weights of ``init.checkpoint``.

    Every rank must call. Raises InputError or CheckpointError where the weights cannot be had.
    """
    spec, runtime = job.spec, job.runtime
    if spec.init.checkpoint is None:
        job.initialize()
    else:
        _load_initial(job, spec.init.checkpoint)
    seed_rng(spec.train.seed, 0, runtime.rank)
    return Progress(loss_scale=spec.precision.first_loss_scale)


def _load_initial(job: Job, checkpoint: str) -> None:
    spec, runtime = job.spec, job.runtime
    root, step = runtime.together(lambda: _located(checkpoint))
    manifest = runtime.together(lambda: ckpt.read_manifest(root, step))
    tokenizer = job.corpora.tokenizer_fingerprint
    runtime.together(lambda: _check_tokenizer(spec.data, tokenizer, root, manifest))
    arrays = [array for array in job.weights() if not is_adapter(array.spec.name)]
    missing: Missing = "refuse" if spec.init.strict else "keep"
    if missing == "keep" or spec.tune is not None:
        job.initialize()  # of adapters a checkpoint to begin with has none
    rename = spec.init.rename
    kept = runtime.together(lambda: _load_weights(root, manifest, arrays, rename, missing))
    for name in kept:
        job.events.note(f"{name} is not in init.checkpoint and is initialized at random")
    job.events.note(f"initial weights are those of step {manifest.step} in {root}")
    saved = stored_spec(manifest.spec)
    for section in ("model", "moe"):
        before, now = saved.get(section), spec.as_dict()[section]
        for field, was, here in ckpt.lifecycle.spec_differences(before, now, section):
            job.events.note(
                f"spec differs from that of init.checkpoint: {field} was {was}, is {here}"
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
