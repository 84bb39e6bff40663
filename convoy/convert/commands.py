"""Import, export and upcycling, each from a folder to a new folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tomli_w
import torch
from pydantic import ValidationError

import ckpt
from ckpt import CheckpointError, Manifest
from ckpt.format import TREE, manifest_key
from ckpt.interop import SafetensorsTarget
from ckpt.rewrite import (
    MEMORY,
    Converted,
    Described,
    Source,
    rewrite,
    write_checkpoint,
)
from ckpt.store import new_folder
from convoy.convert import hf
from convoy.convert.grown import Upcycled, misfit, upcycled_spec, weight_arrays
from convoy.convert.merged import merged_source
from convoy.convert.tokenizer import (
    TOKENIZER,
    FoundTokenizer,
    files_of_hf,
    tokenizer_of_checkpoint,
    tokenizer_of_hf,
)
from corpus.config import DataConfig
from moe import MoEConfig
from parallel import Topology
from pretrain.errors import InputError
from pretrain.model import ModelConfig
from pretrain.spec import JobSpec, moe_fields, resolve_spec, stored_spec
from pretrain.state import tokenizer_of

_SEQ_LEN = 1024
_NO_TEXT = "name the text to train on here"


def refuse_existing(target: Path) -> None:
    """Raises InputError where ``target`` is there already: better before the work than after."""
    if target.exists():
        raise InputError(f"{target} must not exist: choose another folder, or remove it")


def import_hf(source: Path, target: Path) -> tuple[JobSpec, int]:
    """Make ``target/checkpoints`` and ``target/spec.toml`` of a Hugging Face folder.

    Returns the spec and the verified bytes. Raises InputError for what Convoy cannot express, and
    CheckpointError for files that are not whole. Memory is bounded, however large the tensors are.
    An import that stops half-way leaves nothing.
    """
    refuse_existing(target)
    sections, weights, kind = open_hf_folder(source)
    tokenizer = tokenizer_of_hf(source, sections[0]["vocab_size"])
    spec = new_spec(sections, target, tokenizer)
    state = {"imported_from": kind, "tokenizer": tokenizer.fingerprint if tokenizer else ""}
    return spec, _write(target, spec, weights, state, source)


def open_hf_folder(source: Path) -> tuple[hf.Sections, Source, str]:
    """The sections of a Hugging Face folder, its weights under Convoy's names in the files'
    dtypes, and the family. Raises as :func:`import_hf`."""
    config = hf.HFConfig.read(source)
    family = hf.family_of(config)
    model, moe = family.sections(config)
    try:
        spec = new_spec((model, moe), source)  # says what does not fit, before files are read
    except InputError as error:
        reason = str(error).removeprefix(f"{source}: ")
        raise InputError(f"{config.where}: {config.theirs(reason, family.names)}") from None
    if spec.model.num_mtp_layers and not hf.has_mtp(source, spec.model.num_layers):
        model = {**model, "num_mtp_layers": 0}
        spec = new_spec((model, moe), source)
    arrays = weight_arrays(spec.model, spec.moe)
    tensors = hf.hf_tensors(arrays, family.tensors)
    spare = config.size("num_nextn_predict_layers", 0)
    files = hf.open_hf(source, tensors, spec.model.num_layers, spare, family.ignored)
    return (model, moe), hf.from_hf(files, tensors, arrays), family.model_type


def new_spec(
    sections: hf.Sections, target: Path, tokenizer: FoundTokenizer | None = None
) -> JobSpec:
    """A spec to train on with, where a checkpoint brings none of its own; its ``data.source`` is
    for a person to name, and is refused until then."""
    model, moe = sections
    name = _name_for(target)
    spec: dict[str, Any] = {
        "name": name,
        "model": model,
        "data": {
            "source": _NO_TEXT,
            "path": str(Path("runs", "corpora", name).absolute()),
            "seq_len": min(model["max_seq_len"] or _SEQ_LEN, _SEQ_LEN),
        },
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
        "train": {"steps": 1000},
        "init": {"checkpoint": str(target.absolute() / "checkpoints")},
        "optimizer": {"lr": 1e-5},
        "schedule": {"warmup_steps": 100},
    }
    if moe is not None:
        spec["moe"] = moe
    if tokenizer is not None:
        own = str(target.absolute() / TOKENIZER)
        spec["data"] |= {"tokenizer": own, "end_token": tokenizer.end_token}
    return resolve_spec(spec, str(target))


def _name_for(target: Path) -> str:
    """The name of a run that begins in a folder: the folder's, without what no name may have."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", target.absolute().name).lstrip("._-") or "imported"


def _write(
    target: Path, spec: JobSpec, weights: Source, state: dict[str, Any], source: Path
) -> int:
    """Make ``target`` of the checkpoint, the spec, and the tokenizer of ``source`` if the spec
    names it; returns the verified bytes. Weights are converted to the model's dtype, float32."""
    arrays = weight_arrays(spec.model, spec.moe)
    info = replace(
        weights.info,
        step=0,
        topology=Topology(),
        state=state,
        spec=spec.as_dict(),
        spec_hash=spec.hash,
    )
    made = Described(Converted(weights, arrays, "float32"), info, arrays)
    try:
        with new_folder(target) as folder:
            manifest = write_checkpoint(made, folder / "checkpoints", Topology())
            verified = ckpt.verify(folder / "checkpoints", manifest)
            if spec.data.tokenizer == str(target.absolute() / TOKENIZER):
                shutil.copyfile(source / TOKENIZER, folder / TOKENIZER)
            (folder / "spec.toml").write_text(spec_toml(spec))
    except OSError as error:
        raise InputError(
            f"{target} cannot be written: {error.strerror}: {error.filename or target}"
        ) from None
    return verified


def spec_toml(spec: JobSpec) -> str:
    """A spec as the TOML of what differs from the defaults."""
    values = spec.model_dump(mode="json", exclude_defaults=True, exclude_none=True)
    if spec.moe is not None and "capacity" in values["moe"]:
        # The policy is a default of its own variant.
        values["moe"]["capacity"]["policy"] = spec.moe.capacity.policy
    heading = (
        "# Set data.source to the text to train on. batch, train, optimizer and schedule are a\n"
        "# start.\n"
    )
    return heading + tomli_w.dumps(values)


def export_hf(
    root: Path,
    target: Path,
    step: int | None = None,
    family: str | None = None,
    dtype: torch.dtype = torch.float32,
    max_file_bytes: int = 5 * 10**9,
) -> tuple[hf.Family, Manifest, int, Path | str | None]:
    """Write a checkpoint's weights, and their tokenizer, as a Hugging Face folder; moments stay
    behind.

    Returns the family, the manifest that was read, the bytes of the tensors, and the file of the
    tokenizer, None where it was not found. Raises InputError
    for what the family cannot express, and CheckpointError for a checkpoint that is not whole or a
    target that cannot be written. After a full disk or a kill the same call goes on: until then
    ``target`` is not there, and a hidden folder beside it has the files that are done.
    """
    manifest = ckpt.read_manifest(root, step)
    model, moe = _sections_of(root, manifest)
    seq_len = int((stored_spec(manifest.spec).get("data") or {}).get("seq_len", _SEQ_LEN))
    came_from = manifest.state.get("imported_from")
    made = hf.FAMILIES[family] if family else hf.family_for(model, moe, seq_len, came_from)
    name = str(dtype)
    try:
        config = made.config(model, moe, seq_len) | {"torch_dtype": name.removeprefix("torch.")}
    except InputError as error:
        others = ", ".join(hf.expressing(model, moe, seq_len)) or "no family"
        raise InputError(f"{error}; {others} can express this model") from None
    arrays = weight_arrays(model, moe)
    source = merged_source(root, manifest)
    wrong = misfit(source, arrays, "the model of its spec")
    if wrong is not None:
        raise CheckpointError(f"checkpoint array {wrong}")
    weights = hf.to_hf(source, hf.hf_tensors(arrays, made.tensors), name.removeprefix("torch."))
    tokenizer = tokenizer_of_checkpoint(root, manifest.state, _data_of(manifest), model.vocab_size)
    beside = {}
    if tokenizer is not None:
        beside = files_of_hf(tokenizer, config["max_position_embeddings"])
        config["eos_token_id"] = tokenizer.tokenizer.token_to_id(tokenizer.end_token)
    beside["config.json"] = (json.dumps(config, indent=2) + "\n").encode()
    rewrite(SafetensorsTarget(weights, target, Topology(), max_file_bytes, beside), MEMORY)
    written = sum(array.nbytes for array in weights.arrays.values())
    return made, manifest, written, None if tokenizer is None else tokenizer.path


def _data_of(manifest: Manifest) -> DataConfig | None:
    """The ``[data]`` section of a checkpoint's spec; None where it is not of this version."""
    with suppress(ValidationError):
        return DataConfig.model_validate(stored_spec(manifest.spec).get("data"))
    return None


def _check_has_spec(root: Path, manifest: Manifest) -> None:
    if TREE in manifest.state:
        where = ckpt.open_store(root).where(manifest_key(manifest.step))
        raise CheckpointError(
            f"checkpoint {where} was saved by save_state_dict: it has no model spec, which "
            f"convoy convert needs"
        )


def _sections_of(root: Path, manifest: Manifest) -> tuple[ModelConfig, MoEConfig | None]:
    _check_has_spec(root, manifest)
    try:
        spec = stored_spec(manifest.spec)
        moe = moe_fields(spec)
        return (
            ModelConfig.model_validate(spec.get("model")),
            None if moe is None else MoEConfig.model_validate(moe),
        )
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        where = ckpt.open_store(root).where(manifest_key(manifest.step))
        raise CheckpointError(f"manifest {where} has no spec of this version: {what}") from None


def upcycle(
    source: Path,
    target: Path,
    num_experts: int,
    top_k: int,
    first_k_dense: int = 0,
    overrides: Sequence[str] = (),
    step: int | None = None,
) -> tuple[JobSpec, int]:
    """Make a MoE of a dense checkpoint, Convoy's or a Hugging Face folder, as :func:`import_hf`.

    Sparse upcycling (Komatsuzaki et al., arXiv 2212.05055): every expert of a layer is a copy of
    its dense feed-forward, the router has initial weights, and the first layers may stay dense.
    ``overrides`` are ``section.field=value``, such as ``moe.aux_loss_coeff=0.02``.

    Raises InputError where the source is no dense model, or the sizes would not be its own.
    """
    refuse_existing(target)
    weights: Source
    if (source / "config.json").exists():
        (model, moe), weights, kind = open_hf_folder(source)
        tokenizer = tokenizer_of_hf(source, model["vocab_size"])
        base = new_spec((model, moe), target, tokenizer).as_dict()
        known = {"tokenizer": tokenizer.fingerprint if tokenizer else ""}
    else:
        manifest = ckpt.read_manifest(source, step)
        _check_has_spec(source, manifest)
        resolved = resolve_spec(stored_spec(manifest.spec), f"the spec of step {manifest.step}")
        base, weights, kind = resolved.as_dict(), merged_source(source, manifest), "checkpoint"
        known = tokenizer_of(manifest.state)
    base |= {"name": _name_for(target), "run_dir": None, "tune": None}
    base["init"]["checkpoint"] = str(target.absolute() / "checkpoints")
    base["checkpoint"]["path"] = None
    sizes = num_experts, top_k, first_k_dense
    spec = upcycled_spec(base, *sizes, overrides, str(source))
    state = {"upcycled_from": kind, **known}
    return spec, _write(target, spec, Upcycled(weights, spec), state, source)
