"""The tensors of a Hugging Face checkpoint and the parameters that they are.

Legend: E experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from parallel import expert_parameter_names
from pretrain.model import Decoder

_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.wq_a.weight": "self_attn.q_a_proj.weight",
    "attention.q_a_norm.weight": "self_attn.q_a_layernorm.weight",
    "attention.wq_b.weight": "self_attn.q_b_proj.weight",
    "attention.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attention.kv_a_norm.weight": "self_attn.kv_a_layernorm.weight",
    "attention.wkv_b.weight": "self_attn.kv_b_proj.weight",
    "ffn.w_gate.weight": "mlp.gate_proj.weight",
    "ffn.w_up.weight": "mlp.up_proj.weight",
    "ffn.w_down.weight": "mlp.down_proj.weight",
    "moe.router.weight": "mlp.gate.weight",
    "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "moe.shared_experts.w_gate.weight": "mlp.shared_experts.gate_proj.weight",
    "moe.shared_experts.w_up.weight": "mlp.shared_experts.up_proj.weight",
    "moe.shared_experts.w_down.weight": "mlp.shared_experts.down_proj.weight",
    # Of each expert alone, and transposed: Convoy's are [in, out].
    "moe.experts.w_gate": "mlp.experts.{expert}.gate_proj.weight",
    "moe.experts.w_up": "mlp.experts.{expert}.up_proj.weight",
    "moe.experts.w_down": "mlp.experts.{expert}.down_proj.weight",
}


class HFTensor(NamedTuple):
    """One tensor of a Hugging Face checkpoint and the parameter that it is."""

    name: str
    parameter: str
    expert: int | None
    """The part of an expert parameter, transposed in the file."""
    shape: tuple[int, ...]
    """In the file."""


def hf_tensors(decoder: Decoder, names: Mapping[str, str]) -> Iterator[HFTensor]:
    """Every tensor of the checkpoint of a decoder, layer after layer.

    Args:
        decoder: its names and shapes alone are used; it may be on the meta device.
        names: what the family calls otherwise than the others, by the name within a layer.
    """
    experts = expert_parameter_names(decoder)
    named = chain(decoder.named_parameters(), decoder.named_buffers())
    for name, tensor in sorted(named, key=lambda pair: _place(pair[0])):
        shape, hf_name = tuple(tensor.shape), _hf_name(name, names)
        if name not in experts:
            yield HFTensor(hf_name, name, None, shape)
            continue
        for expert in range(shape[0]):
            yield HFTensor(hf_name.format(expert=expert), name, expert, (shape[2], shape[1]))


def _hf_name(name: str, names: Mapping[str, str]) -> str:
    match = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    if match is None:
        return _NAMES[name]
    return f"model.layers.{match[1]}.{names.get(match[2]) or _LAYER_NAMES[match[2]]}"


def _place(name: str) -> int:
    """Sorts the embedding before the layers, and norm and head after them; stable within."""
    match = re.match(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else -1 if name.startswith("embed.") else 1 << 30
