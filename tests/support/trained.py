"""Tiny checkpoints of runs, with moments and all, in memory: random bits under Convoy's names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ckpt.interop.dcp_writer as dcp_writer
import ckpt.interop.safetensors_writer as safetensors_writer
from ckpt.rewrite import SourceArray, SourceInfo
from convoy.convert.formats.opened import Opened
from convoy.convert.formats.own import with_spec
from convoy.convert.formats.state import Training
from convoy.convert.grown import weight_arrays
from pretrain.spec import resolve_spec
from tests.support.jobs import tiny
from tests.support.sources import MemorySource

SIGMOID = {
    "score_func": "sigmoid", "expert_bias": True, "num_shared_experts": 1, "route_scale": 2.5,
    "aux_loss_coeff": 0.0,
}  # fmt: skip
QK = {"qk_norm": "head", "head_dim": 4}
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"model": {"num_layers": 1}},
    "twelve layers": {"model": {"num_layers": 12, "d_model": 8}},
    "one key-value head": {"model": {"num_kv_heads": 1}},
    "a key-value head for each query head": {"model": {"num_kv_heads": 4}},
    "tied": {"model": {"tie_embeddings": True}},
    "square experts": {"model": {"d_model": 16}, "moe": {"d_ff": 16}},
    "shared experts and a bias": {"moe": SIGMOID},
    "a dense layer first": {"model": {"first_k_dense": 1, "d_ff": 20, "num_layers": 3}},
    "a dense layer first, a bias, eleven experts": {
        "model": {"first_k_dense": 1, "d_ff": 20, "num_layers": 3},
        "moe": {**SIGMOID, "num_experts": 11},
    },
}
"""What differs between models that all formats can hold."""


def spec_of(folder: Path, layout: str) -> Any:
    """The spec of one of the layouts."""
    changes = LAYOUTS[layout]
    model = {
        "vocab_size": 300, "d_model": 12, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
        "d_ff": 0, "first_k_dense": 0, **QK, **changes.get("model", {}),
    }  # fmt: skip
    moe = {"num_experts": 3, "top_k": 2, "d_ff": 6, "aux_loss_coeff": 0.01}
    sections = tiny(folder)
    sections |= {"model": model, "moe": {**moe, **changes.get("moe", {})}}
    return resolve_spec(sections, "test")


def checkpoint(folder: Path, layout: str) -> Opened:
    """A checkpoint with AdamW's moments, as from a run of 40 steps."""
    spec = spec_of(folder, layout)
    weights = weight_arrays(spec.model, spec.moe)
    arrays: dict[str, SourceArray] = dict(weights)
    for moment in ("exp_avg", "exp_avg_sq"):
        for name, array in weights.items():
            if not name.endswith("expert_bias"):
                arrays[name.replace("model/", f"optimizer/{moment}/", 1)] = array
    training = Training(40, updates=40, tokens=40 * 256, samples=320, position=40)
    training = with_spec(training, spec, arrays)
    info = SourceInfo("memory", 40, spec=spec.as_dict(), spec_hash=spec.hash)
    return Opened(MemorySource(arrays, info), "memory", "arrays", training)


def cut_finely(monkeypatch: Any) -> None:
    """Files and chunks of few bytes, as of many ranks."""
    monkeypatch.setattr(dcp_writer, "CHUNK_BYTES", 400)
    monkeypatch.setattr(dcp_writer, "FILE_BYTES", 3000)
    monkeypatch.setattr(safetensors_writer, "FILE_BYTES", 3000)


def without_step(training: Training) -> Training:
    """What of a state every format keeps."""
    return replace(training, tokens=None, samples=None)
