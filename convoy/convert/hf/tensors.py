"""The tensors of a Hugging Face checkpoint, and which part of Convoy's arrays each one is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from ckpt.rewrite import SourceArray
from pretrain.state import MODEL, MTP, is_expert_matrix, name_in_layer, parameter_name

_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "attention.wq.bias": "self_attn.q_proj.bias",
    "attention.wk.bias": "self_attn.k_proj.bias",
    "attention.wv.bias": "self_attn.v_proj.bias",
    "attention.wo.bias": "self_attn.o_proj.bias",
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
    "moe.shared_gate.weight": "mlp.shared_expert_gate.weight",
    # One tensor for each expert, transposed: Convoy's are [in, out].
    "moe.experts.w_gate": "mlp.experts.{expert}.gate_proj.weight",
    "moe.experts.w_up": "mlp.experts.{expert}.up_proj.weight",
    "moe.experts.w_down": "mlp.experts.{expert}.down_proj.weight",
}
"""Of most families: a tensor within a layer, by the parameter's name there."""
_MTP_NAMES = {
    "embed_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_COPIES = {"embed_tokens.weight": ("model/embed/weight",),
           "shared_head.head.weight": ("model/head/weight", "model/embed/weight")}  # fmt: skip
"""What each layer of multi-token prediction has again, and the array that it is: the first of these
that the decoder has."""


class In(NamedTuple):
    """A parameter that is a part of a tensor."""

    tensor: str
    lead: Literal["expert", "one"] | None = None
    """The first dim of the tensor: the experts; or of one place, which Convoy has not."""
    piece: int = 0
    pieces: int = 1
    """The rows of the tensor are those of so many parameters, one after another; ``piece`` counts
    from 0."""


class Within(NamedTuple):
    """Where in a larger tensor of the files a tensor is."""

    tensor: str
    shape: tuple[int, ...]
    """Of the larger tensor."""
    lead: tuple[int, ...]
    """The index of its first dims."""
    piece: int
    pieces: int


class HFTensor(NamedTuple):
    """One tensor of a Hugging Face checkpoint, and which part of Convoy's arrays it is."""

    name: str
    array: str
    """In the logical tree, such as ``model/layers/ffn/w_up/weight``."""
    indices: tuple[int, ...]
    """Index of the first dims of the array: none, the layer, or the layer and the expert."""
    shape: tuple[int, ...]
    """In the file."""
    transposed: bool
    """Whether the file has the part of the array with its two dims swapped."""
    copy: bool = False
    """Whether another tensor has the same numbers: an import does not need this one."""
    within: Within | None = None
    """The larger tensor that has this one in the files, whose name is then made up."""

    @property
    def in_files(self) -> tuple[str, tuple[int, ...]]:
        """Name and shape of what the files have."""
        if self.within is None:
            return self.name, self.shape
        return self.within.tensor, self.within.shape


def hf_tensors(arrays: Mapping[str, SourceArray], names: Mapping[str, str | In]) -> list[HFTensor]:
    """Every tensor of the checkpoint of a decoder: the embedding, layer after layer, the head.

    Layers of multi-token prediction have the numbers after the decoder's last, as in DeepSeek-V3,
    and each has copies of embedding and head.

    Args:
        arrays: the decoder's, with the attribute ``layers`` where layers are stacked.
        names: the family's own names of tensors, by the parameter's name within a layer.
    """
    tensors: list[tuple[int, HFTensor]] = []
    num_layers = len(arrays[f"{MODEL}layers/attention_norm/weight"].attributes["layers"])
    for array, about in arrays.items():
        inner = name_in_layer(array)
        if inner is None:
            first = -1 if array.startswith("model/embed/") else 1 << 30
            hf_name = _NAMES[parameter_name(array)]
            tensors.append((first, HFTensor(hf_name, array, (), about.shape, False)))
            continue
        called = names.get(inner) or LAYER_NAMES.get(inner) or _MTP_NAMES[inner]
        after = num_layers if array.startswith(MTP) else 0
        for i, number in enumerate(about.attributes["layers"]):
            layer = after + number
            prefix = f"model.layers.{layer}."
            tensors += [(layer, tensor) for tensor in _of_layer(array, about, i, prefix, called)]
    mtp = arrays.get(f"{MTP}layers/attention_norm/weight")
    for number in [] if mtp is None else mtp.attributes["layers"]:
        for inner, originals in _COPIES.items():
            array = next(name for name in originals if name in arrays)
            name, layer = f"model.layers.{num_layers + number}.{inner}", num_layers + number
            copy = HFTensor(name, array, (), arrays[array].shape, False, copy=True)
            tensors.append((layer, copy))
    return [tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])]


def _of_layer(
    array: str, about: SourceArray, index: int, prefix: str, called: str | In
) -> list[HFTensor]:
    """The tensors of one layer's part of an array."""
    if not is_expert_matrix(array):
        return [_tensor(array, (index,), about.shape[1:], False, prefix, called, about.shape)]
    _, experts, rows, columns = about.shape
    return [
        _tensor(array, (index, expert), (columns, rows), True, prefix, called, about.shape)
        for expert in range(experts)
    ]


def _tensor(
    array: str,
    indices: tuple[int, ...],
    shape: tuple[int, ...],
    transposed: bool,
    prefix: str,
    called: str | In,
    stacked: tuple[int, ...],
) -> HFTensor:
    expert = indices[1] if len(indices) > 1 else None
    if isinstance(called, str):
        name = prefix + called.format(expert=expert)
        return HFTensor(name, array, indices, shape, transposed)
    lead: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()
    if called.lead is not None:
        lead = (0,) if expert is None else (expert,)
        sizes = (1,) if expert is None else (stacked[1],)
    larger = (*sizes, called.pieces * shape[0], *shape[1:])
    within = Within(prefix + called.tensor, larger, lead, called.piece, called.pieces)
    name = f"{within.tensor} {list(lead)} {called.piece + 1}/{called.pieces}"
    return HFTensor(name, array, indices, shape, transposed, within=within)
