"""Hugging Face: a folder with ``config.json`` and safetensors.

Hugging Face has no format of an optimizer's state that can be read without running a pickle. Its
state is put in a subfolder, which transformers does not look at: ``optimizer`` has safetensors with
``exp_avg/NAME`` and ``exp_avg_sq/NAME`` for each tensor NAME of the model, and ``training.json``.

Legend: L layers, E experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt.errors import readable
from ckpt.interop import SafetensorsSource, SafetensorsTarget, is_safetensors
from ckpt.rewrite import CombinedTarget, FolderTarget, Selected, Source, SourceArray, Target
from convoy.convert import hf
from convoy.convert.commands import open_hf_folder
from convoy.convert.formats.opened import Opened, Together
from convoy.convert.formats.rules import ADAM, OPTIMIZER, split_slot
from convoy.convert.formats.state import Training
from convoy.convert.grown import misfit, weight_arrays
from moe import MoEConfig
from parallel.layout import Topology
from pretrain.errors import InputError
from pretrain.model import ModelConfig
from pretrain.spec import moe_fields, stored_spec
from pretrain.state import MODEL

_SEQ_LEN = 1024
_STATE, _TRAINING = "optimizer", "training.json"


class HuggingFace:
    """See :class:`convoy.convert.formats.opened.Format`."""

    name = "huggingface"

    @property
    def kinds(self) -> Mapping[str, hf.Family]:
        """The families; see :mod:`convoy.convert.hf`."""
        return hf.FAMILIES

    def is_one(self, path: Path) -> bool:
        """See Format."""
        return (path / "config.json").is_file() and is_safetensors(path)

    def open(self, path: Path, num_heads: int | None, step: int | None = None) -> Opened:
        """See Format."""
        (model, moe), weights, kind = open_hf_folder(path)
        spec: dict[str, Any] = {"model": model} | ({} if moe is None else {"moe": moe})
        training = Training()
        source: Source = weights
        if (path / _STATE / _TRAINING).is_file():
            with readable(path / _STATE / _TRAINING):
                training = Training.from_json(json.loads((path / _STATE / _TRAINING).read_text()))
        if is_safetensors(path / _STATE):
            source = self._with_moments(path, kind, weights)
        info = replace(source.info, spec=spec, step=training.step)
        return Opened(source, self.name, kind, training, info=info)

    def _with_moments(self, path: Path, kind: str, weights: Source) -> Source:
        stored = SafetensorsSource(path / _STATE)
        sources: list[tuple[str, Source]] = [("", weights)]
        for moment in ADAM:
            names = {
                n.removeprefix(f"{moment}/"): n for n in stored.arrays if n.startswith(moment + "/")
            }
            tensors = [t for t in _tensors(weights.arrays, hf.FAMILIES[kind]) if t.name in names]
            ours = hf.from_hf(Selected(stored, names), tensors, weights.arrays)
            renamed = {n.replace(MODEL, f"{OPTIMIZER}{moment}/", 1): n for n in ours.arrays}
            sources.append(("", Selected(ours, renamed)))
        return Together(sources, weights.info)

    def without_place(self, source: Opened, kind: str, num_heads: int | None) -> list[str]:
        """See Format. Raises InputError where the family cannot express the model."""
        model, moe = model_of(source)
        hf.FAMILIES[kind].config(model, moe, _SEQ_LEN)
        wrong = misfit(source, weight_arrays(model, moe), "the model of its spec")
        if wrong is not None:
            raise InputError(f"array {wrong}")
        slots = {MODEL, *(f"{OPTIMIZER}{moment}/" for moment in ADAM)}
        return [name for name in source.arrays if split_slot(name)[0] not in slots]

    def target(self, source: Opened, kind: str, folder: Path, num_heads: int | None) -> Target:
        """See Format."""
        family, (model, moe) = hf.FAMILIES[kind], model_of(source)
        dtype = source.arrays[f"{MODEL}embed/weight"].logical_dtype
        weights = _theirs(source, MODEL, family, dtype)
        seq_len = (source.info.spec.get("data") or {}).get("seq_len", _SEQ_LEN)
        config = family.config(model, moe, seq_len) | {"torch_dtype": dtype}
        beside = {"config.json": (json.dumps(config, indent=2) + "\n").encode()}
        members: dict[str, FolderTarget] = {
            "": SafetensorsTarget(weights, folder, Topology(), beside={})
        }
        there = {split_slot(name)[0] for name in source.arrays}
        moments = [
            (f"{moment}/", _theirs(source, f"{OPTIMIZER}{moment}/", family, "float32"))
            for moment in ADAM
            if f"{OPTIMIZER}{moment}/" in there
        ]
        if moments:
            together = Together(moments, source.info)
            members[_STATE] = SafetensorsTarget(together, folder / _STATE, Topology(), beside={})
        if moments or source.training != Training():
            text = json.dumps(source.training.as_json(), indent=1) + "\n"
            beside[f"{_STATE}/{_TRAINING}"] = text.encode()
        return CombinedTarget(weights, folder, members, beside)


def _tensors(arrays: Mapping[str, SourceArray], family: hf.Family) -> list[Any]:
    return hf.hf_tensors(arrays, family.tensors)


def _theirs(source: Source, slot: str, family: hf.Family, dtype: str) -> Source:
    """The tensors of weights, or of a moment, under the names of a family."""
    names = {n.replace(slot, MODEL, 1): n for n in source.arrays if n.startswith(slot)}
    ours = Selected(source, names)
    weights = {n: a for n, a in source.arrays.items() if n.startswith(MODEL)}
    tensors = [t for t in _tensors(weights, family) if t.array in names]
    if slot != MODEL:
        tensors = [tensor for tensor in tensors if not tensor.copy]
    return hf.to_hf(ours, tensors, dtype)


def model_of(source: Opened) -> tuple[ModelConfig, MoEConfig | None]:
    """The model of a checkpoint. Raises InputError where the checkpoint does not say."""
    spec = stored_spec(source.info.spec)
    if not spec.get("model"):
        raise InputError(
            f"a {source.form} checkpoint does not say what its model is, as its heads and its "
            f"routing: name a spec that does (--spec)"
        )
    moe = moe_fields(spec)
    return (
        ModelConfig.model_validate(spec["model"]),
        None if moe is None else MoEConfig.model_validate(moe),
    )
