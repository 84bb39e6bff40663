"""megatron-core: the ``torch_dist`` folder of a ``GPTModel``, ``checkpoints/iter_N``.

Read from megatron-core 0.19: transformer/transformer_block.py, transformer/moe/experts/grouped.py,
transformer/mlp.py, optimizer/optimizer.py, dist_checkpointing/serialization.py. Layers and experts
are named in three ways: all layers alike in one array (``stacked``), an array for each layer
(``layers``), and an array for each expert, gate and up (``singles``, singleton_local_shards). The
norm before experts has a name of its own in models of Transformer Engine, and that of a dense layer
in the others (``-local``).

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

import json
import re
from argparse import Namespace
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

from ckpt.interop import DcpSource, DcpTarget, TensorInFile, is_dcp, read_torch_file
from ckpt.rewrite import Selected, SourceArray, Target
from convoy.convert.formats.flat_optimizer import (
    FIXED_SETTINGS,
    Parameters,
    by_matrices,
    settings_of,
)
from convoy.convert.formats.links import Link, Linked
from convoy.convert.formats.names import DOWN, GATE, ROUTER_BIAS, UP
from convoy.convert.formats.opened import Declared, Opened, Raw, opened
from convoy.convert.formats.rules import QKV, Kind, Naming, Rule, lay_out
from convoy.convert.formats.state import Training, common
from parallel.layout import Topology
from pretrain.errors import InputError

_NAMING = Naming(moment="optimizer.state.{moment}.{p}")
_FFN_NORM = "layers/ffn_norm/weight"
_OF_DENSE, _OF_EXPERTS = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"


def _halves(theirs: str, gate: str, up: str, *, turned: bool, apart: bool) -> tuple[Rule, ...]:
    """Gate and up: two arrays where they are apart, or one matrix."""
    if not apart:
        return (Rule(theirs, (gate, up), turned=turned),)
    return (Rule(f"{theirs}_w", gate, turned=turned), Rule(f"{theirs}_v", up, turned=turned))


def _kind(way: str, *, local: bool) -> Kind:
    layer = "decoder.layers." if way == "stacked" else "decoder.layers.{layer}."
    apart = way == "singles"
    experts = layer + "mlp.experts.experts." + ("{expert}." if apart else "")
    plain = {
        "self_attention.linear_qkv.layer_norm_weight": "attention_norm/weight",
        "input_layernorm.weight": "attention_norm/weight",
        "self_attention.linear_proj.weight": "attention/wo/weight",
        "self_attention.q_layernorm.weight": "attention/q_norm/weight",
        "self_attention.k_layernorm.weight": "attention/k_norm/weight",
        "mlp.router.weight": "moe/router/weight",
        "mlp.shared_experts.gate_weight": "moe/shared_gate/weight",
        "mlp.linear_fc2.weight": "ffn/w_down/weight",
        "mlp.shared_experts.linear_fc2.weight": "moe/shared_experts/w_down/weight",
    }
    dense = [f"layers/ffn/w_{role}/weight" for role in ("gate", "up")]
    shared = [f"layers/moe/shared_experts/w_{role}/weight" for role in ("gate", "up")]
    norm_of_experts = _OF_DENSE if local else _OF_EXPERTS
    return Kind(
        (
            Rule("embedding.word_embeddings.weight", "embed/weight"),
            Rule("decoder.final_layernorm.weight", "norm/weight"),
            Rule("output_layer.weight", "head/weight"),
            *(Rule(layer + name, f"layers/{ours}") for name, ours in plain.items()),
            Rule(layer + _OF_DENSE, _FFN_NORM, where="dense"),
            Rule(layer + norm_of_experts, _FFN_NORM, where="sparse"),
            Rule(layer + "self_attention.linear_qkv.weight", QKV, by_group=True),
            Rule(layer + "mlp.router.expert_bias", ROUTER_BIAS, of="buffer"),
            *_halves(layer + "mlp.linear_fc1.weight", *dense, turned=False, apart=apart),
            *_halves(
                layer + "mlp.shared_experts.linear_fc1.weight", *shared, turned=False, apart=apart
            ),
            *_halves(experts + "linear_fc1.weight", GATE, UP, turned=True, apart=apart),
            Rule(experts + "linear_fc2.weight", DOWN, turned=True),
        ),
        _NAMING,
    )


KINDS = {
    f"{way}{'-local' if local else ''}": _kind(way, local=local)
    for way in ("layers", "stacked", "singles")
    for local in (False, True)
}
REFUSED = (
    (r"embedding\.position_embeddings\..*", "position_embedding_type = learned_absolute",
     "rope"),
    (r"mtp\..*", "mtp_num_layers (multi-token prediction)", "none"),
    (r".*\.linear_(q|kv)_(down_proj|up_proj|proj)\..*", "multi_latent_attention", "false"),
    (r".*(layernorm\.bias|layer_norm_bias)", "normalization = LayerNorm", "RMSNorm"),
    (r".*linear_qkv\.bias", "add_bias_linear or add_qkv_bias", "false"),
    (r".*linear_(proj|fc1|fc2)\.bias(_[wv])?", "add_bias_linear", "false"),
    (r".*mixer\..*", "hybrid layers (Mamba and others)", "none"),
    (r".*fc[12]_latent_proj\..*", "moe_latent_size", "none"),
    (r".*softmax_offset", "softmax_type other than vanilla", "vanilla"),
)  # fmt: skip
"""Arrays of models that Convoy lacks: the option, and what it must be."""


_CHAINED = re.compile(r"chained_\d+\.")
_MOMENT = r"optimizer\.state\.(?:exp_avg|exp_avg_sq)\.(.+)"
_MASTER = "optimizer.state.fp32_param."
_COMMON = "common_state/shard_0_1"
_COMMON_FILE = "common.pt"
_LINEAR = re.compile(r"(decoder\..*\.linear_(?:fc1|fc2|proj|qkv))\.weight(?:_[wv])?")
_MODEL = re.compile(r"(embedding|decoder|output_layer|mtp)\..*")
_METADATA = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
SCHEDULE = {
    "max_lr": "max_lr", "min_lr": "min_lr", "warmup_steps": "lr_warmup_steps",
    "decay_steps": "lr_decay_steps", "style": "lr_decay_style",
}  # fmt: skip


class Megatron(Declared):
    """See :class:`convoy.convert.formats.opened.Format`."""

    name, kinds = "megatron", KINDS

    def is_one(self, path: Path) -> bool:
        """See Format. Raises InputError for a checkpoint of megatron-core in another format."""
        refuse_other_formats(path)
        return is_dcp(path) and any(
            name == "embedding.word_embeddings.weight" for name in DcpSource(path).arrays
        )

    def open(self, path: Path, num_heads: int | None, step: int | None = None) -> Opened:
        """See Format."""
        source, where = DcpSource(path), str(path)
        names: dict[str, str] = {}
        behind = []
        for name in source.arrays:
            plain = _CHAINED.sub("", name, count=1) if _CHAINED.match(name) else name
            if plain.startswith(_MASTER):
                names[plain.removeprefix(_MASTER)] = name  # counts more than the copy in 16 bits
            elif _MODEL.fullmatch(plain):
                names.setdefault(plain, name)
            elif re.fullmatch(_MOMENT, plain):
                names[plain] = name
            else:
                behind.append(name)
        for name in names:
            refuse(name)
        state = common_state(source, path)

        def training(links: list[Link]) -> Training:
            return _training(state, Parameters.of(links, _MOMENT))

        behind += [n for n in source.left_out if "_extra_state" not in n and n != _COMMON]
        raw = Raw(Selected(source, names), training, behind)
        return opened(self.name, KINDS, raw, where, num_heads)

    def target(self, source: Opened, kind: str, folder: Path, num_heads: int | None) -> Target:
        """See Format."""
        layout = lay_out(KINDS[kind], source.arrays, num_heads)
        theirs = Linked(source, layout.links, layout.arrays, "theirs", source.info)
        parameters = Parameters.of(layout.links, _MOMENT)
        objects: dict[str, Any] = {_COMMON: [_state(source.training, parameters)]}
        objects |= _extra_states(layout.arrays)
        beside = {"metadata.json": json.dumps(_METADATA).encode()}
        return DcpTarget(theirs, folder, Topology(), objects=objects, beside=beside)


def _extra_states(arrays: Mapping[str, SourceArray]) -> dict[str, Any]:
    """What Megatron asks for of each linear module, and each expert's: the state of 8-bit products,
    of which there is none."""
    states: dict[str, Any] = {}
    for name, array in arrays.items():
        match = _LINEAR.fullmatch(name)
        if match is None:
            continue
        lead = array.shape[:-2] or (1,)
        for index in product(*map(range, lead)):
            of, count = (".".join(map(str, numbers)) for numbers in (index, lead))
            states[f"{match[1]}._extra_state/shard_{of}_{count}"] = [None]
    return states


def refuse_other_formats(folder: Path) -> None:
    """Raises InputError for a checkpoint of megatron-core in another format than torch_dist, which
    is torch.distributed.checkpoint's."""
    try:
        kind = json.loads((folder / "metadata.json").read_text()).get("sharded_backend")
    except (OSError, ValueError, AttributeError):
        return
    if kind not in (None, "torch_dist"):
        raise InputError(
            f"{folder / 'metadata.json'} has sharded_backend {kind}; it must be torch_dist: load "
            f"the checkpoint with a Megatron that still reads {kind}, and save it as torch_dist"
        )


def refuse(name: str) -> None:
    """Raises InputError for an array of a model that Convoy lacks, naming the option."""
    for pattern, option, needed in REFUSED:
        if re.fullmatch(pattern, name):
            raise InputError(f"{name} is of a model with {option}; it must be {needed}")


def common_state(source: DcpSource, path: Path) -> Mapping[str, Any]:
    """What Megatron keeps of the run: up to 0.15 in a file, from then on as an object; empty where
    there is neither."""
    state: Any = None
    if _COMMON in source.left_out:
        state = source.read_object(_COMMON)
    elif (path / _COMMON_FILE).is_file():
        state = read_torch_file(path / _COMMON_FILE)
    state = state[0] if isinstance(state, list) and state else state
    return state if isinstance(state, dict) else {}


def _training(state: Mapping[str, Any], parameters: Parameters) -> Training:
    scheduler = state.get("opt_param_scheduler") or {}
    optimizer = state.get("optimizer") or {}
    chain = [optimizer] if "param_groups" in optimizer or "optimizer" in optimizer else [
        of for of in optimizer.values() if isinstance(of, dict)
    ]  # fmt: skip
    groups: list[dict[str, Any]] = []
    updates = None
    for of in chain:
        of = of.get("optimizer", of) if "param_groups" not in of else of
        groups += [group for group in of.get("param_groups", []) if isinstance(group, dict)]
        step = (of.get("state") or {}).get("common_step")
        step = step.item() if isinstance(step, TensorInFile) else step
        steps = [step, *(group.get("step") for group in of.get("param_groups", []))]
        updates = next((int(s) for s in steps if isinstance(s, int | float)), updates)
    arguments = getattr(state.get("args"), "state", None) or {}
    samples = arguments.get("consumed_train_samples", scheduler.get("num_steps"))
    step = int(state.get("iteration") or 0)
    return Training(
        step,
        updates=updates if parameters.paths else None,
        samples=None if samples is None else int(samples),
        position=step if scheduler else None,
        schedule={
            ours: scheduler[theirs]
            for ours, theirs in SCHEDULE.items()
            if scheduler.get(theirs) is not None
        },
        optimizer=common(groups),
        decay=by_matrices(parameters, [g["weight_decay"] for g in groups if "weight_decay" in g]),
    )


def _state(training: Training, parameters: Parameters) -> dict[str, Any]:
    """What :func:`_training` reads."""
    state: dict[str, Any] = {"iteration": training.step, "checkpoint_version": 3.0}
    if training.step and training.samples is None:
        raise InputError(
            "megatron counts its schedule in sequences, and SRC does not say how many it has "
            "trained on: name them with --samples"
        )
    decays = sorted(set(training.decay.values()), reverse=True)
    scheduler = {
        "num_steps": training.samples or 0,
        "start_wd": 0.0,
        "end_wd": 0.0,
        "wd_incr_steps": 0,
    }
    if decays:
        scheduler |= {"start_wd": decays[0], "end_wd": decays[0]}
    shape = {theirs: training.schedule.get(ours) for ours, theirs in SCHEDULE.items()}
    state["opt_param_scheduler"] = {**shape, **scheduler, "wd_incr_style": "constant"}
    if parameters.paths:
        settings = settings_of(training, "megatron")
        settings = {word: settings[word] for word in ("lr", "betas", "eps")}
        if "initial_lr" in training.optimizer:
            settings["initial_lr"] = training.optimizer["initial_lr"]
        groups = [
            {**FIXED_SETTINGS, **settings, "weight_decay": decay, "wd_mult": float(decay > 0),
             "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
            for decay in decays
        ]  # fmt: skip
        updates = training.step if training.updates is None else training.updates
        state["optimizer"] = {"param_groups": groups, "state": {"common_step": updates}}
    if training.samples is not None:
        state["args"] = Namespace(consumed_train_samples=training.samples)
    return state
