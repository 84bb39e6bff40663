"""Whether a checkpoint can be resumed with this spec, corpus and topology."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import ValidationError

import ckpt
from ckpt import Manifest
from parallel import Topology
from pretrain.errors import InputError
from pretrain.job import Job
from pretrain.spec import JobSpec
from pretrain.state import read_run_state

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


def check_resumable(job: Job, manifest: Manifest) -> None:
    """Raise InputError where spec, corpus or topology forbids a resume from a manifest."""
    root, spec = job.spec.checkpoint_path, job.spec
    where = f"the checkpoint of step {manifest.step} in {root}"
    state = read_run_state(manifest)
    if state is None:
        raise InputError(
            f"checkpoint.path ({root}) must be the run's own: {where} holds weights alone; name it "
            f"in train.init_from"
        )
    for field, before, now in ckpt.spec_differences(resolved(manifest.spec), spec.as_dict()):
        if field not in _FREE and any(field == f or field.startswith(f"{f}.") for f in _FIXED):
            raise InputError(
                f"{field} ({now}) must be as in {where} ({before}); start over elsewhere, or put "
                f"it back"
            )
    if state.corpus != job.corpus.fingerprint:
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


def resolved(saved: dict[str, Any]) -> dict[str, Any]:
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
    return resolved(kept) if gone else saved
