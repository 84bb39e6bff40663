"""Opening a checkpoint of any trainer for examination, whatever is wrong with it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt.errors import CheckpointError
from ckpt.format import Manifest, read_manifest
from ckpt.interop import DcpSource, SafetensorsSource, is_dcp, is_safetensors
from ckpt.rewrite import Selected, Source
from convoy.convert import merged_source, with_dots
from convoy.convert.formats import is_automodel
from convoy.doctor.folders import (
    AutomodelFolders,
    DeepSpeedFiles,
    is_deepspeed,
    megatron_steps,
)
from convoy.doctor.patient import Declared, Patient
from pretrain.errors import InputError
from pretrain.state import MODEL

_EXPERTS = (
    "num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts", "num_routed_experts",
)  # fmt: skip
_LLAMA4 = ("llama4", "llama4_text", "gpt_oss")
_RATE = 0.001
"""The usual rate of expert biases; a run that has ended with a lower one has begun with it."""
_LATITUDE = 4.0
_ITERATION = re.compile(r"(?:iter|step|global_step)[-_]?(\d+)")
"""The name of a folder that says its step, as Megatron's do."""
_STEPS = ("train_state/step", "train_state.step")
_MEGATRON = re.compile(r"decoder\.layers\.|embedding\.word_embeddings\.")


def open_patient(location: str, step: int | None = None) -> Patient:
    """A checkpoint's parts and what it says of itself.

    Raises CheckpointError or InputError, one line each, where it cannot be read.
    """
    path = Path(location)
    of_files = is_dcp(path) or is_safetensors(path)
    if step is not None and (of_files or is_deepspeed(path) or is_automodel(path)):
        raise InputError(f"--step ({step}) is for checkpoint folders; {path} holds one step alone")
    if is_deepspeed(path):
        files = DeepSpeedFiles(path)
        steps, updates = files.steps()
        declared = Declared("DeepSpeed universal", step=updates, exact_steps=steps is not None)
        return Patient(files, declared)
    if is_automodel(path):
        folders = AutomodelFolders(path)
        return Patient(folders, Declared("NeMo Automodel", step=folders.step))
    if of_files:
        foreign = DcpSource(path) if is_dcp(path) else SafetensorsSource(path)
        if foreign.described:  # Convoy wrote it, and says of what
            return Patient(foreign, _of_convoy(foreign))
        of = _of_dcp(foreign, path) if isinstance(foreign, DcpSource) else _of_config(path)
        return Patient(foreign, of)
    source = with_dots(weights_of_tuned(location, read_manifest(location, step)))
    return Patient(source, _of_convoy(source))


def weights_of_tuned(location: str, manifest: Manifest) -> Source:
    """A checkpoint of Convoy; of a tuned run the weights, with its adapters added to them. Which
    moments a tuned run has depends on what it tunes."""
    source = merged_source(location, manifest)
    if not manifest.spec.get("tune"):
        return source
    return Selected(source, {name: name for name in source.arrays if name.startswith(MODEL)})


def _of_dcp(source: DcpSource, path: Path) -> Declared:
    names = source.arrays
    if any(_MEGATRON.match(name) for name in names):
        step, updates = megatron_steps(source, path)
        return Declared("Megatron dist", step=_named_step(path, step), updates=updates)
    for name in _STEPS:
        step = _counter(source, name)
        if step is not None:
            # torchtitan has no loss scale: each step is an update.
            return Declared("torchtitan", step=step, exact_steps=True)
    return Declared("torch.distributed.checkpoint", step=_named_step(path, None))


def _named_step(path: Path, step: int | None) -> int | None:
    named = _ITERATION.fullmatch(path.absolute().name)
    return int(named[1]) if step is None and named is not None else step


def _counter(source: DcpSource, name: str) -> int | None:
    """A count that is a tensor or, as newer versions save it, an object."""
    if name in source.arrays:
        array = source.arrays[name]
        if array.logical_dtype not in ("int32", "int64"):
            return None
        values = source.read_box(name, tuple((0, size) for size in array.shape))
        return int(values.reshape(-1)[0])
    if name in source.left_out:
        value = source.read_object(name)
        return int(value) if isinstance(value, int) else None
    return None


def _of_config(path: Path) -> Declared:
    config = path / "config.json" if path.is_dir() else path.parent / "config.json"
    try:
        values = json.loads(config.read_text())
    except OSError:
        return Declared(form="safetensors")
    except ValueError as error:
        raise CheckpointError(f"{config} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{config} must be a table of values")
    text = values.get("text_config")
    values = {**values, **text} if isinstance(text, dict) else values
    experts = next((_size(values, name) for name in _EXPERTS if _size(values, name)), None)
    if _size(values, "zero_expert_num"):
        experts = None  # routers have rows for experts without weights too
    layers = _size(values, "num_hidden_layers")
    biased = values.get("topk_method") == "noaux_tc"
    return Declared(
        form="Hugging Face",
        experts=experts,
        layers=layers,
        moe_layers=_moe_layers(values, layers) if experts else None,
        biased=bool(biased),
        in_out=values.get("model_type") in _LLAMA4,
    )


def _size(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _moe_layers(values: Mapping[str, Any], layers: int | None) -> tuple[int, ...] | None:
    """The layers with experts, of families that say so by the words of DeepSeek or of Qwen."""
    dense = _size(values, "first_k_dense_replace")
    frequency = values.get("moe_layer_freq", 1)
    if layers is None or not isinstance(frequency, int):
        return None
    if dense is not None:
        return tuple(n for n in range(layers) if n >= dense and n % frequency == 0)
    if "decoder_sparse_step" in values:
        step, only = _size(values, "decoder_sparse_step") or 1, values.get("mlp_only_layers") or []
        return tuple(n for n in range(layers) if n not in only and (n + 1) % step == 0)
    return None


def _of_convoy(source: Source) -> Declared:
    spec, state = source.info.spec, source.info.state
    moe, model = spec.get("moe") or {}, spec.get("model") or {}
    layers, dense = model.get("num_layers"), model.get("first_k_dense", 0)
    rate = moe.get("bias_update_rate", _RATE)
    begun = (spec.get("init") or {}).get("checkpoint")
    limited = moe.get("expert_bias") and rate and not begun
    limited = limited and moe.get("balancing", "standard") == "standard"
    training = state.get("kind") == "training"
    return Declared(
        form="Convoy",
        experts=moe.get("num_experts"),
        layers=layers,
        moe_layers=tuple(range(dense, layers)) if moe and layers else None,
        biased=bool(moe.get("expert_bias")),
        bias_limit=_LATITUDE * max(rate, _RATE) * source.info.step if limited else None,
        step=source.info.step if training else 0,
        exact_steps=False,
        moments_expected=training and not spec.get("tune"),
    )
