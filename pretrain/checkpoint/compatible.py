"""Whether a checkpoint can be resumed with this spec, corpus and topology."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

import ckpt
from ckpt import Manifest
from corpus.manifest import recorded_manifest
from parallel import Topology
from pretrain.data import BatchConfig, Blend, Corpus, changed_shard
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.section import OnResume
from pretrain.spec import CONSTANTS, JobSpec, other_constants, rule_of, stored_spec
from pretrain.state import RunState, read_run_state


def check_resumable(job: Job, manifest: Manifest) -> None:
    """Raise InputError where spec, corpus or topology forbids a resume from a manifest."""
    root, spec = job.spec.checkpoint_path, job.spec
    where = f"the checkpoint of step {manifest.step} in {root}"
    state = read_run_state(manifest)
    if state is None:
        raise InputError(
            f"checkpoint.path ({root}) must be the run's own: {where} holds weights alone; name it "
            f"in init.checkpoint"
        )
    for field, value in other_constants(manifest.spec).items():
        raise InputError(
            f"{field} ({value}) of {where} is an option that was dropped: this version computes "
            f"with {CONSTANTS[field]}; end the run with the version that began it"
        )
    before = resolved(manifest.spec)
    _check_spec(spec, before, where)
    _check_batch_stages(spec, before, state.progress.consumed_samples, where)
    if spec.train.exact:
        _check_threads(state.threads, where)
    _check_sources(job.corpora.sources, spec.run_path, state, where)
    reshards = spec.checkpoint.reshard_on_load or spec.elastic.enabled
    if manifest.topology != job.topology.as_dict() and not reshards:
        raise InputError(
            f"layout ({job.topology.describe()}) must be that of {where} "
            f"({Topology(**manifest.topology).describe()}), or "
            f"checkpoint.reshard_on_load must be true"
        )


def _check_spec(spec: JobSpec, before: dict[str, Any], where: str) -> None:
    """Raise InputError where a field that a resume must not change has another value."""
    differences = ckpt.lifecycle.spec_differences(before, spec.as_dict())
    # The changed variant first: the fields of a union that only one of two specs has follow it.
    for field, was, now in sorted(differences, key=lambda d: not d[0].endswith(".policy")):
        rule = rule_of(field)
        if rule is OnResume.FIXED:
            raise InputError(
                f"{field} ({now}) must be as in {where} ({was}); start over elsewhere, or put it "
                f"back"
            )
        if rule is OnResume.FIXED_IF_EXACT and spec.train.exact:
            raise InputError(
                f"{field} ({_text(now)}) must be as in {where} ({_text(was)}) with train.exact "
                f"(true): bits depend on it"
            )


def _check_batch_stages(spec: JobSpec, before: dict[str, Any], samples: int, where: str) -> None:
    """Raise InputError where the batch of steps that are taken would have been another."""
    tokens = samples * spec.data.seq_len
    was = BatchConfig.model_validate(before["batch"]).begun_stages(tokens)
    if spec.batch.begun_stages(tokens) != was:
        raise InputError(
            f"batch.stages must be as in {where} up to its {tokens} tokens; add stages from there "
            f"on"
        )


def _check_sources(sources: Sequence[Corpus], run_path: Path, state: RunState, where: str) -> None:
    """Raise InputError where a source has other tokens than it had."""
    for source in sources:
        before = state.sources.get(source.name)
        if before is None or before == source.manifest.fingerprint:
            continue
        recorded = recorded_manifest(run_path, before)
        what = "its tokens are others"
        if recorded is not None:
            what = changed_shard(recorded, source.manifest)
        raise InputError(f"data.path ({source.data.path}) must hold the corpus of {where}; {what}")
    if state.blend is not None:
        try:
            Blend.from_json(state.blend)
        except ValueError as error:
            raise InputError(f"{where} cannot be resumed: {error}") from None
    elif state.corpus not in {source.manifest.fingerprint for source in sources}:
        raise InputError(
            f"data.sources must have the corpus of {where} ({state.corpus[:12]}), which names no "
            f"sources"
        )


def _check_threads(threads: int | None, where: str) -> None:
    """Raise InputError where threads would give other bits than the run without a stop."""
    if threads != torch.get_num_threads():
        raise InputError(
            f"threads of a process ({torch.get_num_threads()}) must be as in {where} ({threads}) "
            f"with train.exact (true): bits depend on them; set OMP_NUM_THREADS={threads}"
        )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def resolved(saved: dict[str, Any]) -> dict[str, Any]:
    """A spec that a checkpoint holds, in this version's terms.

    Fields that are new get their defaults; fields that were removed are left out. A spec that this
    version refuses stays as it is.
    """
    kept = stored_spec(saved)
    try:
        return JobSpec.model_validate(kept).as_dict()
    except ValidationError:
        return kept
