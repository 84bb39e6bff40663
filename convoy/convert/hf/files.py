"""The weights of a Hugging Face folder: its tensors, and which part of Convoy's arrays each one is;
its safetensors files as a source, and a source as such files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ckpt.interop import (
    SAFETENSORS_DTYPES,
    SAFETENSORS_INDEX,
    SAFETENSORS_SINGLE,
    SafetensorsSource,
)
from ckpt.rewrite import (
    MEMORY,
    Converted,
    Source,
    SourceArray,
    Stacked,
    Transposed,
    Unstacked,
    row_major_boxes,
)
from pretrain.errors import InputError
from pretrain.state import MODEL, MTP, is_expert_matrix, name_in_layer, parameter_name

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
    # One tensor for each expert, transposed: Convoy's are [in, out].
    "moe.experts.w_gate": "mlp.experts.{expert}.gate_proj.weight",
    "moe.experts.w_up": "mlp.experts.{expert}.up_proj.weight",
    "moe.experts.w_down": "mlp.experts.{expert}.down_proj.weight",
    # Of a layer of multi-token prediction.
    "embed_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}
_COPIES = {"embed_tokens.weight": ("model/embed/weight",),
           "shared_head.head.weight": ("model/head/weight", "model/embed/weight")}  # fmt: skip
"""What each layer of multi-token prediction has again, and the array that it is: the first of these
that the decoder has."""
_MTP_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""What no other layer has."""
_READABLE = ("F32", "BF16", "F16")
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERT_BIAS = "e_score_correction_bias"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")
_IN_FILES = {logical: name for name, logical in SAFETENSORS_DTYPES.items()}


class HFTensor(NamedTuple):
    """One tensor of a Hugging Face checkpoint, and which part of Convoy's arrays it is."""

    name: str
    array: str
    """In the logical tree, such as ``model/layers/ffn/w_up/weight``."""
    place: tuple[int, ...]
    """Index of the first dims of the array: none, the layer, or the layer and the expert."""
    shape: tuple[int, ...]
    """In the file."""
    transposed: bool
    """Whether the file has the part of the array with its two dims swapped."""
    copy: bool = False
    """Whether another tensor has the same numbers: an import does not need this one."""


def hf_tensors(arrays: Mapping[str, SourceArray], names: Mapping[str, str]) -> list[HFTensor]:
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
        hf_name = names.get(inner) or _LAYER_NAMES[inner]
        after = num_layers if array.startswith(MTP) else 0
        for i, number in enumerate(about.attributes["layers"]):
            layer = after + number
            prefix = f"model.layers.{layer}."
            if not is_expert_matrix(array):
                tensor = HFTensor(prefix + hf_name, array, (i,), about.shape[1:], False)
                tensors.append((layer, tensor))
                continue
            _, experts, rows, columns = about.shape
            for expert in range(experts):
                name = prefix + hf_name.format(expert=expert)
                tensor = HFTensor(name, array, (i, expert), (columns, rows), True)
                tensors.append((layer, tensor))
    mtp = arrays.get(f"{MTP}layers/attention_norm/weight")
    for number in [] if mtp is None else mtp.attributes["layers"]:
        for inner, originals in _COPIES.items():
            array = next(name for name in originals if name in arrays)
            name, layer = f"model.layers.{num_layers + number}.{inner}", num_layers + number
            copy = HFTensor(name, array, (), arrays[array].shape, False, copy=True)
            tensors.append((layer, copy))
    return [tensor for _, tensor in sorted(tensors, key=lambda pair: pair[0])]


def has_mtp(folder: Path, num_layers: int) -> bool:
    """Whether a folder's files have multi-token prediction after ``num_layers`` layers. A config
    may speak of it where the files have none, as after a save by transformers.

    Raises CheckpointError as :func:`open_hf` does.
    """
    if not any((folder / name).exists() for name in (SAFETENSORS_INDEX, SAFETENSORS_SINGLE)):
        return False
    arrays = SafetensorsSource(folder).arrays
    return any(f"model.layers.{num_layers}.{own}" in arrays for own in _MTP_OWN)


def open_hf(
    folder: Path, expected: Sequence[HFTensor], num_layers: int, spare_layers: int
) -> SafetensorsSource:
    """The tensors of a folder's safetensors files, by the names that they have there.

    ``spare_layers`` after ``num_layers`` are not looked at where nothing of them is expected: those
    of multi-token prediction, of a family that Convoy has without. Copies may be missing.

    Raises InputError, naming the file, where there are no such files, and for tensors that are
    missing, unexpected, or of another shape or dtype; and CheckpointError for files that are not
    whole.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    if not any((folder / name).exists() for name in (SAFETENSORS_INDEX, SAFETENSORS_SINGLE)):
        pickles = sorted(p.name for s in ("bin", "pt", "pth") for p in folder.glob(f"*.{s}"))
        if pickles:
            raise InputError(
                f"{folder / pickles[0]} is pickle, which can run code and is never read: "
                f"save the model as safetensors"
            )
        raise InputError(f"{folder} has no {SAFETENSORS_SINGLE} and no {SAFETENSORS_INDEX}")
    source = SafetensorsSource(folder)
    wanted = {tensor.name: tensor for tensor in expected if not tensor.copy}
    originals = {t.array: t.name for t in wanted.values() if not t.place}
    copies = {t.name: originals[t.array] for t in expected if t.copy}
    if any(int(match[1]) >= num_layers for match in map(_LAYER.match, wanted) if match):
        spare_layers = 0
    for name in source.arrays:
        path = source.places[name].path
        if name.endswith("weight_scale_inv"):
            raise InputError(f"{path}: {name}: the weights are fp8; convert them to bf16 first")
        layer = _LAYER.match(name)
        spare = layer and 0 <= int(layer[1]) - num_layers < spare_layers
        if name in copies:
            _check_same(source, name, copies[name], "multi-token prediction shares it")
        elif name not in wanted and not spare and not _BUFFERS.fullmatch(name):
            _check_duplicate(source, name, path, wanted)
    for tensor in wanted.values():
        _check_tensor(source, tensor, folder)
    return source


def _check_tensor(source: SafetensorsSource, tensor: HFTensor, folder: Path) -> None:
    name = tensor.name
    if name not in source.arrays:
        hint = "; config.json does not tie it" if name == _HEAD else ""
        raise InputError(f"{folder}: tensor {name} is missing{hint}")
    where, array = f"{source.places[name].path}: {name}", source.arrays[name]
    if array.shape != tensor.shape:
        raise InputError(
            f"{where} has shape {list(array.shape)}, config.json needs {list(tensor.shape)}"
        )
    dtype = _IN_FILES[array.logical_dtype]
    if dtype not in _READABLE:
        raise InputError(f"{where} has dtype {dtype}, one of {', '.join(_READABLE)} is read")


def _check_duplicate(
    source: SafetensorsSource, name: str, path: Path, wanted: Mapping[str, HFTensor]
) -> None:
    """A tied head may be stored, if it is the embedding."""
    if name != _HEAD or _EMBED not in source.arrays or _EMBED not in wanted:
        raise InputError(f"{path}: tensor {name} is unexpected: nothing in config.json has it")
    _check_same(source, name, _EMBED, "config.json's tie_word_embeddings is true")


def _check_same(source: SafetensorsSource, name: str, original: str, why: str) -> None:
    copy, first = source.arrays[name], source.arrays.get(original)
    if first is None:
        return  # the error is that of the original, which is missing
    boxes = row_major_boxes(copy.shape, copy.dtype.itemsize, MEMORY // 8)
    if (copy.shape, copy.logical_dtype) != (first.shape, first.logical_dtype) or any(
        source.read_box(name, box).tobytes() != source.read_box(original, box).tobytes()
        for box in boxes
    ):
        raise InputError(f"{source.places[name].path}: {name} must be {original} where {why}")


def from_hf(
    source: Source, tensors: Sequence[HFTensor], arrays: Mapping[str, SourceArray]
) -> Source:
    """Hugging Face tensors as a decoder's ``arrays``: layers and experts stacked, the experts'
    matrices transposed, numbers in the files' dtypes."""
    members: dict[str, dict[tuple[int, ...], str]] = {}
    for tensor in (tensor for tensor in tensors if not tensor.copy):
        members.setdefault(tensor.array, {})[tensor.place] = tensor.name
    turned = Transposed(source, [tensor.name for tensor in tensors if tensor.transposed])
    return Stacked(turned, members, {name: array.attributes for name, array in arrays.items()})


def to_hf(source: Source, tensors: Sequence[HFTensor], dtype: str) -> Source:
    """The inverse of :func:`from_hf`, in ``dtype``.

    Experts' biases stay in float32, as those of DeepSeek do: in bfloat16 other experts would be
    chosen.
    """
    single = Unstacked(source, {tensor.name: (tensor.array, tensor.place) for tensor in tensors})
    turned = Transposed(single, [tensor.name for tensor in tensors if tensor.transposed])
    biases = [tensor.name for tensor in tensors if tensor.name.endswith(_EXPERT_BIAS)]
    others = [tensor.name for tensor in tensors if not tensor.name.endswith(_EXPERT_BIAS)]
    return Converted(Converted(turned, biases, "float32"), others, dtype)
