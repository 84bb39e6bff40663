"""What ranks of the cases about lost experts run, and a folder as of Mixtral, written by hand.

Legend: E experts, D d_model, F d_ff.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ckpt
from moe import MoEConfig, MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp, local_shard

E = 4
CONFIG = MoEConfig(d_model=16, d_ff=24, num_experts=E, top_k=2)


def layer(seed: int = 0) -> MoELayer:
    """A layer in which no two experts are alike."""
    torch.manual_seed(seed)
    return MoELayer(CONFIG)


def save_layer(rank: int, root: str, ep: int) -> None:
    """Save a layer over two ranks: each has half of the experts, or half of each expert."""
    dims = ParallelDims.build(Topology(dp_shard=2, ep=ep), "cpu")
    model = nn.Sequential(layer())
    apply_expert_parallel(model, dims.ep_mesh)
    apply_fsdp(model, dims, blocks=[model[0]])
    ckpt.save_state_dict(root, {"model": model.state_dict()}, step=1)


def save_pruned(rank: int, root: str) -> str:
    """Save experts as a model has them that keeps its rank's half alone, numbered from 0; what was
    said."""
    weights = layer().state_dict()["experts.w_down"].chunk(2)[rank]
    state = {f"experts.{i}.w_down": weight.clone() for i, weight in enumerate(weights)}
    try:
        ckpt.save_state_dict(root, state, step=1)
    except ckpt.CheckpointError as error:
        return str(error)
    return "saved"


def load_layer(rank: int, root: str) -> Tensor:
    """Load a layer into half of the experts on each of two ranks; this rank's half."""
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    model = nn.Sequential(layer(seed=1))
    apply_expert_parallel(model, dims.ep_mesh)
    ckpt.load_state_dict(root, {"model": model.state_dict()})
    return local_shard(model[0].experts.w_down).detach().clone()


MIXTRAL = {"w1": "w_gate", "w3": "w_up", "w2": "w_down"}
"""The names of an expert's matrices, by those in the files."""


def write_mixtral(folder: Path, D: int, F: int) -> dict[str, Tensor]:
    """A folder as of transformers with one layer; returns its tensors."""
    config = {
        "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "vocab_size": 300,
        "hidden_size": D, "intermediate_size": F, "num_hidden_layers": 1, "head_dim": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": E,
        "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_act": "silu",
        "max_position_embeddings": 64, "tie_word_embeddings": False,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (300, D), "lm_head.weight": (300, D),
              "model.norm.weight": (D,)}  # fmt: skip
    prefix = "model.layers.0."
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{prefix}{name}.weight"] = (D,)
    shapes |= {f"{prefix}self_attn.{x}_proj.weight": (16, D) for x in "qkv"}
    shapes[f"{prefix}self_attn.o_proj.weight"] = (D, 16)
    shapes[f"{prefix}block_sparse_moe.gate.weight"] = (E, D)
    for e in range(E):
        for name in MIXTRAL:
            shape = (D, F) if name == "w2" else (F, D)
            shapes[f"{prefix}block_sparse_moe.experts.{e}.{name}.weight"] = shape
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors
