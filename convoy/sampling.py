"""Text from the weights of a checkpoint, on any ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import ckpt
from ckpt import Location, Manifest
from convoy.audit import spec_on_ranks
from corpus.location import is_there
from corpus.tokenizer import load_tokenizer, tokenizer_at, tokenizer_fingerprint
from pretrain.checkpoint import saved_spec
from pretrain.errors import InputError
from pretrain.job import build_model
from pretrain.runtime import launched_world, start
from pretrain.spec import JobSpec, SampleConfig
from pretrain.train import Drawing, Generated, generate


def sample(
    location: Location,
    prompts: Sequence[str],
    *,
    tokens: int,
    temperature: float = 0.8,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    tokenizer: Path | None = None,
    overrides: Sequence[str] = (),
    seen: Callable[[int, str], None] | None = None,
) -> list[Generated]:
    """Each prompt and what the model makes of it; every rank must call, and gets the texts.

    Nothing is written. The layout is one replica that all ranks shard, with experts over as many
    ranks as divide them, unless ``overrides`` have another one.

    Args:
        location: a checkpoint folder or URL, or the path of a manifest.
        prompts: texts; an empty one begins a document.
        tokens: to generate at most, for each prompt.
        temperature: divides the logits; 0 always takes the token with the highest logit.
        top_p: only the likeliest tokens are drawn whose probabilities reach this sum.
        seed: of the draws; each prompt begins with it.
        step: of the checkpoint; None for the newest.
        tokenizer: a tokenizer.json; None for that of the prepared corpus, or of ``data.tokenizer``.
        overrides: ``section.field=value``, over the spec that the checkpoint holds.
        seen: called with a prompt's number and its text so far, where the text has grown.

    Raises InputError where the settings, the tokenizer or the layout do not fit, and
    CheckpointError where the checkpoint is not whole.
    """
    settings, drawing = SampleConfig(tokens=tokens), Drawing(temperature, top_p)
    runtime = start(timeout_seconds=600.0)
    try:
        root, manifest = runtime.together(lambda: read_checkpoint(location, step))
        spec = runtime.together(lambda: forward_spec(manifest, overrides, seed))
        words = runtime.together(lambda: _tokenizer_of(spec, manifest, tokenizer))
        model = build_model(spec, runtime)
        runtime.together(lambda: ckpt.load(root, manifest, model.weights(), extra="ignore"))
        return [
            generate(
                model,
                words,
                settings.model_copy(update={"prompt": prompt}),
                drawing,
                None if seen is None else partial(seen, number),
            )
            for number, prompt in enumerate(prompts)
        ]
    finally:
        runtime.close()


def read_checkpoint(location: Location, step: int | None) -> tuple[Location, Manifest]:
    """The folder or URL of a checkpoint, and its manifest: the newest one without ``step``.

    Raises InputError and CheckpointError where there is no such checkpoint.
    """
    try:
        root, named = ckpt.format.locate(location, step)
    except ValueError as error:
        raise InputError(str(error)) from None
    return root, ckpt.read_manifest(root, named)


def forward_spec(manifest: Manifest, overrides: Sequence[str], seed: int | None = None) -> JobSpec:
    """The spec of a checkpoint for forwards alone, on one replica that all ranks shard, with
    experts over as many ranks as divide them, unless ``overrides`` have another layout.

    Raises InputError where the checkpoint has no spec, or the layout does not fit.
    """
    if not manifest.spec:
        raise InputError(
            f"the checkpoint of step {manifest.step} must hold a job spec: `convoy convert import` "
            f"makes a checkpoint with one"
        )
    saved: dict[str, Any] = saved_spec(manifest)
    saved["train"]["compile"] = False
    if seed is not None:
        saved["train"]["seed"] = seed
    saved["init"], saved["sample"] = {}, {}
    settings = list(overrides)
    experts = (saved.get("moe") or {}).get("num_experts", 1)
    if not any(setting.startswith("parallel.") for setting in settings):
        settings.append(f"parallel.ep={math.gcd(launched_world(), experts)}")
    return spec_on_ranks(saved, "the spec of the checkpoint", settings)


def _tokenizer_of(spec: JobSpec, manifest: Manifest, file: Path | None) -> Tokenizer:
    data = spec.data
    if file is not None:
        tokenizer, name = tokenizer_at(file), str(file)
    elif is_there(data.tokenizer_file):
        tokenizer, name = load_tokenizer(data), data.tokenizer_file
    elif data.tokenizer is not None and is_there(data.tokenizer):
        tokenizer, name = tokenizer_at(data.tokenizer), data.tokenizer
    else:
        raise InputError(
            f"the tokenizer of the corpus ({data.tokenizer_file}) is not there: name the "
            f"tokenizer.json of the model with --tokenizer"
        )
    known = manifest.state.get("tokenizer")
    if known and known != tokenizer_fingerprint(tokenizer):
        raise InputError(
            f"the tokenizer {name} is not that of the checkpoint: its fingerprint is "
            f"{tokenizer_fingerprint(tokenizer)[:12]}, the checkpoint has {known[:12]}; name the "
            f"model's tokenizer.json with --tokenizer"
        )
    return tokenizer
