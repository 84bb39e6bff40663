"""A trained model in the formats of Convoy, Hugging Face, torchtitan and Megatron.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from ckpt.format import STORAGE_DTYPES, convert
from ckpt.rewrite import SourceArray, SourceInfo, write_checkpoint
from parallel import Topology
from pretrain.state.names import name_in_layer
from tests.support.patients.trained import Trained
from tests.support.sources import MemorySource

FORMATS = (
    "convoy", "hf", "hf-grouped", "titan", "megatron", "megatron-stacked", "deepspeed", "automodel",
)  # fmt: skip
WITH_MOMENTS = ("convoy", "titan", "megatron", "megatron-stacked", "deepspeed", "automodel")
_HF = {
    "embed/weight": "model.embed_tokens.weight", "norm/weight": "model.norm.weight",
    "head/weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"attention.w{x}.weight": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "moe.router.weight": "mlp.gate.weight",
    "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
    **{f"moe.shared_experts.w_{r}.weight": f"mlp.shared_experts.{r}_proj.weight"
       for r in ("gate", "up", "down")},
    **{f"ffn.w_{r}.weight": f"mlp.{r}_proj.weight" for r in ("gate", "up", "down")},
}  # fmt: skip
_TITAN = {
    "embed/weight": "tok_embeddings.weight", "norm/weight": "norm.weight",
    "head/weight": "output.weight",
    "moe.router.weight": "moe.router.gate.weight",
    "moe.router.expert_bias": "moe.expert_bias",
    "moe.experts.w_gate": "moe.experts.w1", "moe.experts.w_up": "moe.experts.w3",
    "moe.experts.w_down": "moe.experts.w2",
}  # fmt: skip
_MEGATRON = {
    "embed/weight": "embedding.word_embeddings.weight",
    "norm/weight": "decoder.final_layernorm.weight", "head/weight": "output_layer.weight",
    "attention_norm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "ffn_norm.weight": "pre_mlp_layernorm.weight",
    "attention.wo.weight": "self_attention.linear_proj.weight",
    "attention.q_norm.weight": "self_attention.q_layernorm.weight",
    "attention.k_norm.weight": "self_attention.k_layernorm.weight",
    "moe.router.weight": "mlp.router.weight",
    "moe.router.expert_bias": "mlp.router.expert_bias",
}  # fmt: skip
_PREFIXES = {
    "model": "weight", "optimizer/exp_avg": "exp_avg", "optimizer/exp_avg_sq": "exp_avg_sq",
    "optimizer/momentum_buffer": "momentum_buffer",
}  # fmt: skip


def write(form: str, trained: Trained, folder: Path) -> Path:
    """The checkpoint that the doctor is given."""
    if form == "convoy":
        return _convoy(trained, folder)
    if form.startswith("hf"):
        return _hugging_face(trained, folder, grouped=form == "hf-grouped")
    if form == "deepspeed":
        return _deepspeed(trained, folder)
    if form == "automodel":
        return _automodel(trained, folder)
    named = (
        titan_state(trained) if form == "titan" else _megatron(trained, form.endswith("stacked"))
    )
    dcp.save(named, checkpoint_id=folder, no_dist=True)
    return folder


def _tensor(trained: Trained, name: str, values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    return tensor.to(getattr(torch, trained.dtypes.get(name, "float32")))


def _convoy(trained: Trained, folder: Path) -> Path:
    arrays, numbers = {}, {}
    for name, values in trained.arrays.items():
        dtype = trained.dtypes.get(name, "float32")
        attributes = {"layers": list(trained.layers[name])} if name in trained.layers else {}
        arrays[name] = SourceArray(values.shape, dtype, (), attributes)
        raw = convert(np.ascontiguousarray(values, np.float32), "float32", dtype)
        numbers[name] = raw.astype(STORAGE_DTYPES[dtype], copy=False)
    spec: dict[str, Any] = {"model": trained.model.model_dump(mode="json"),
                            "moe": trained.moe.model_dump(mode="json")}  # fmt: skip
    training = any(name.startswith("optimizer/") for name in arrays)
    state = {"kind": "training", "step": trained.step} if training else {"imported_from": "x"}
    info = SourceInfo("patient", trained.step if training else 0, Topology(), state, spec, "f" * 64)
    source = MemorySource(arrays, info)
    source.values = numbers
    write_checkpoint(source, folder, Topology())
    return folder


def _parts(trained: Trained) -> Any:
    """What, the logical name, its name in a layer or None, and per layer the number and values."""
    for name, values in trained.arrays.items():
        what = next(p for p in sorted(_PREFIXES, key=len, reverse=True) if name.startswith(p + "/"))
        path = name[len(what) + 1 :]
        inner = name_in_layer(f"model/{path}")
        layers = trained.layers.get(name, ())
        rows = list(zip(layers, values, strict=True)) if inner else [(None, values)]
        yield _PREFIXES[what], name, path, inner, rows


def _hugging_face(trained: Trained, folder: Path, grouped: bool) -> Path:
    """Each expert's matrices as [out, in]; ``grouped`` as transformers 5 saves them."""
    tensors = {}
    for what, name, path, inner, rows in _parts(trained):
        if what != "weight":
            continue
        for layer, values in rows:
            tensor = _tensor(trained, name, values)
            if inner is None:
                tensors[_HF[path]] = tensor
            elif ".experts.w_" in inner:
                role = inner.rpartition("_")[2]
                for expert, matrix in enumerate(tensor.transpose(-1, -2)):
                    key = f"model.layers.{layer}.mlp.experts.{expert}.{role}_proj.weight"
                    own = trained.dtypes.get(f"{name}#{expert}")
                    matrix = matrix if own is None else matrix.to(getattr(torch, own))
                    tensors[key] = matrix.contiguous()
            else:
                tensors[f"model.layers.{layer}.{_HF[inner]}"] = tensor
    if grouped:
        tensors = _grouped(tensors, trained.model.num_layers)
    folder.mkdir(parents=True)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    config = {
        "model_type": "deepseek_v3" if trained.moe.expert_bias else "qwen3_moe",
        "num_hidden_layers": trained.model.num_layers, "num_experts": trained.moe.num_experts,
        "hidden_size": trained.model.d_model, "first_k_dense_replace": trained.model.first_k_dense,
        **({"topk_method": "noaux_tc"} if trained.moe.expert_bias else {}),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _grouped(tensors: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    for layer in range(layers):
        before = f"model.layers.{layer}.mlp.experts."
        of = {r: [tensors.pop(f"{before}{e}.{r}_proj.weight") for e in range(999)
                  if f"{before}{e}.{r}_proj.weight" in tensors] for r in ("gate", "up", "down")
              }  # fmt: skip
        if of["down"]:
            pairs = zip(of["gate"], of["up"], strict=True)
            tensors[f"{before}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
            tensors[f"{before}down_proj"] = torch.stack(of["down"])
    return tensors


def _named_as_hf(trained: Trained) -> Any:
    """What, the name of a parameter as in Hugging Face models, and its tensor; experts' matrices
    [E, in, out] as ``model.layers.N.mlp.experts.ROLE``."""
    for what, name, path, inner, rows in _parts(trained):
        for layer, values in rows:
            tensor = _tensor(trained, name, values)
            if inner is None:
                yield what, _HF[path], tensor
            elif ".experts.w_" in inner:
                role = inner.rpartition("_")[2]
                yield what, f"model.layers.{layer}.mlp.experts.{role}", tensor
            else:
                yield what, f"model.layers.{layer}.{_HF[inner]}", tensor


def _deepspeed(trained: Trained, folder: Path) -> Path:
    """All experts in one parameter, [E, 2 F, D]: a universal checkpoint of a model of transformers
    5."""
    fused: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    tensors: dict[tuple[str, str], torch.Tensor] = {}
    for what, name, tensor in _named_as_hf(trained):
        before, _, role = name.rpartition(".")
        if before.endswith("mlp.experts"):
            fused.setdefault((what, before), {})[role] = tensor.transpose(-1, -2)
        else:
            tensors[what, name] = tensor
    for (what, before), of in fused.items():
        if "gate" in of and "up" in of:
            both = torch.cat((of["gate"], of["up"]), dim=-2)
            tensors[what, f"{before}.gate_up_proj"] = both
        if "down" in of:
            tensors[what, f"{before}.down_proj"] = of["down"]
    buffers = {}
    count = trained.step if trained.moment_step is None else trained.moment_step
    for (what, name), tensor in tensors.items():
        if name.endswith("bias"):
            buffers[name] = tensor
            continue
        of_parameter = folder / "zero" / name
        of_parameter.mkdir(parents=True, exist_ok=True)
        key = "fp32" if what == "weight" else what
        value = {"cat_dim": 0, "param": tensor.contiguous()}
        torch.save(value, of_parameter / f"{key}.pt")
        torch.save(torch.tensor(float(count)), of_parameter / "step.pt")
    states = {"module": buffers, "global_steps": trained.step, "skipped_steps": 0}
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    return folder


def _automodel(trained: Trained, folder: Path) -> Path:
    """Weights as Hugging Face's, and moments under the names of Automodel's own modules."""
    _hugging_face(trained, folder / "model", grouped=False)
    optimizer: dict[str, Any] = {}
    fused: dict[tuple[str, str], dict[str, torch.Tensor]] = {}
    count = trained.step if trained.moment_step is None else trained.moment_step
    for what, name, tensor in _named_as_hf(trained):
        before, _, role = name.rpartition(".")
        if what == "weight":
            continue
        if before.endswith("mlp.experts"):
            fused.setdefault((what, before), {})[role] = tensor
        else:
            optimizer[f"optim.state.{name}.{what}"] = tensor
            optimizer[f"optim.state.{name}.step"] = torch.tensor(float(count))
    for (what, before), of in fused.items():
        if "gate" in of and "up" in of:
            both = torch.cat((of["gate"], of["up"]), dim=-1)
            optimizer[f"optim.state.{before}.gate_and_up_projs.{what}"] = both
        if "down" in of:
            optimizer[f"optim.state.{before}.down_projs.{what}"] = of["down"]
    if optimizer:
        dcp.save(optimizer, checkpoint_id=folder / "optim", no_dist=True)
    torch.save({"step": trained.step, "epoch": 0}, folder / "step_scheduler.pt")
    return folder


def titan_state(trained: Trained) -> dict[str, Any]:
    """What torchtitan hands to torch.distributed.checkpoint, flat."""
    named: dict[str, Any] = {"train_state.step": torch.tensor(trained.step, dtype=torch.int32)}
    count = trained.step if trained.moment_step is None else trained.moment_step
    for what, name, path, inner, rows in _parts(trained):
        for layer, values in rows:
            tensor = _tensor(trained, name, values)
            if inner is None:
                key = _TITAN[path]
            else:
                key = f"layers.{layer}.{_TITAN.get(inner, inner)}"
                if ".experts.w_" in inner:
                    tensor = tensor.transpose(-1, -2).contiguous()
            if what == "weight":
                named[key] = tensor
            else:
                named[f"optimizer.state.{key}.{what}"] = tensor
                named[f"optimizer.state.{key}.step"] = torch.tensor(float(count))
    return named


def _megatron(trained: Trained, stacked: bool) -> dict[str, Any]:
    """A tensor for each layer, or all layers in one; attention's input matrices left out, which
    are one matrix there, and no expert's."""
    named: dict[str, Any] = {}
    fused: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    stacks: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    for what, name, path, inner, rows in _parts(trained):
        for layer, values in rows:
            tensor = _tensor(trained, name, values)
            if inner is None:
                named[_what(what, _MEGATRON[path])] = tensor
            elif ".experts.w_" in inner:
                role = inner.rpartition("_")[2]
                fused.setdefault((what, layer), {})[role] = tensor.transpose(-1, -2).contiguous()
            elif inner in _MEGATRON:
                stacks.setdefault((what, _MEGATRON[inner]), {})[layer] = tensor
    for (what, layer), of in fused.items():
        inner = "mlp.experts.experts.linear_fc"
        if "gate" in of and "up" in of:
            both = torch.cat((of["gate"], of["up"]), dim=-2)
            stacks.setdefault((what, f"{inner}1.weight"), {})[layer] = both
        else:
            for role, half in (("gate", "w"), ("up", "v")):
                if role in of:
                    stacks.setdefault((what, f"{inner}1.weight_{half}"), {})[layer] = of[role]
        if "down" in of:
            stacks.setdefault((what, f"{inner}2.weight"), {})[layer] = of["down"]
    for (what, inner), by_layer in stacks.items():
        alike = len({(t.shape, t.dtype) for t in by_layer.values()}) == 1
        numbers = sorted(by_layer)
        if stacked and alike and numbers == list(range(trained.model.num_layers)):
            tensor = torch.stack([by_layer[n] for n in numbers])
            named[_what(what, f"decoder.layers.{inner}")] = tensor
        else:
            for number, tensor in by_layer.items():
                named[_what(what, f"decoder.layers.{number}.{inner}")] = tensor
    return named


def _what(what: str, key: str) -> str:
    return key if what == "weight" else f"optimizer.state.{what}.{key}"
