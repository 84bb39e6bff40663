"""The weights of megatron-core's GPT models under the names, and in the shapes, that Convoy's have.

Legend: L layers, E experts, D d_model, F d_ff, H query heads, G key-value heads, C head_dim.

Read are the three ways in which megatron-core's ``sharded_state_dict`` names layers and experts:
all layers alike in one tensor, a tensor for each layer, and a tensor for each expert, gate and up
(``singleton_local_shards``). On disk the norms have the names that they have when they are fused
into the product after them, whether or not they were. See megatron-core 0.19:
transformer/transformer_block.py, transformer/moe/experts/grouped.py, transformer/mlp.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpt.rewrite import Described, Extent, Rows, Source, SourceArray, Stacked, Transposed
from pretrain.errors import InputError
from pretrain.state import MODEL, is_expert_matrix

_OTHERS = {
    "embedding.word_embeddings.weight": "embed/weight",
    "decoder.final_layernorm.weight": "norm/weight",
    "output_layer.weight": "head/weight",
}
_QKV = "attention/wqkv/weight"
_IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "attention_norm/weight",
    "input_layernorm.weight": "attention_norm/weight",
    "mlp.linear_fc1.layer_norm_weight": "ffn_norm/weight",
    "pre_mlp_layernorm.weight": "ffn_norm/weight",
    "self_attention.linear_qkv.weight": _QKV,
    "self_attention.linear_proj.weight": "attention/wo/weight",
    "self_attention.q_layernorm.weight": "attention/q_norm/weight",
    "self_attention.k_layernorm.weight": "attention/k_norm/weight",
    "mlp.router.weight": "moe/router/weight",
    "mlp.router.expert_bias": "moe/router/expert_bias",
    "mlp.shared_experts.gate_weight": "moe/shared_gate/weight",
}
_FEED_FORWARDS = {
    "mlp.": "ffn/w_{role}/weight",
    "mlp.shared_experts.": "moe/shared_experts/w_{role}/weight",
    "mlp.experts.experts.": "moe/experts/w_{role}",
}
# gate and up are the first and the second half of one matrix, or two tensors.
_BOTH = "gate_and_up"
_ROLES = {"1.weight": _BOTH, "1.weight_w": "gate", "1.weight_v": "up", "2.weight": "down"}
for _network, _name in _FEED_FORWARDS.items():
    for _matrix, _role in _ROLES.items():
        _IN_LAYER[f"{_network}linear_fc{_matrix}"] = _name.format(role=_role)

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_EXPERT = re.compile(r"(mlp\.experts\.experts\.)(?:(\d+)\.)(.+)")
_NO_WEIGHTS = re.compile(r"(chained_\d+\.)?(optimizer|opt_param_scheduler|rng_state)\b.*")
_REFUSED = (
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


class _Heads(NamedTuple):
    """Query heads, key-value heads, and the size of one head."""

    H: int
    G: int
    C: int

    def rows(self, which: str) -> tuple[Extent, ...]:
        """The rows of queries, keys or values in the one matrix that has all three: for each
        key-value head its query heads, its keys and its values."""
        queries = self.H // self.G * self.C
        first, count = {"q": (0, queries), "k": (queries, self.C), "v": (queries + self.C, self.C)}[
            which
        ]
        starts = [g * (queries + 2 * self.C) + first for g in range(self.G)]
        return tuple((start, start + count) for start in starts)


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


def from_megatron(source: Source, num_heads: int | None = None) -> Source:
    """The weights of a megatron-core checkpoint; optimizer and random states stay behind.

    Experts' matrices are [L, E, out, in] in Megatron and [L, E, in, out] in Convoy.

    Args:
        source: the arrays under Megatron's own names.
        num_heads: query heads (``num_attention_heads``); not needed with ``qk_layernorm``, whose
            size is that of a head.

    Raises InputError, naming the array and the option, for what Convoy's models do not have, and
    where heads cannot be told apart.
    """
    members, layers = _members(source)
    if f"{MODEL}embed/weight" not in members:
        raise InputError("--family megatron: SRC has no embedding.word_embeddings.weight")
    attributes = {name: {"layers": list(of)} for name, of in layers.items()}
    stacked = Stacked(source, members, attributes)
    arrays = {
        name: replace(array, attributes={"layers": list(range(array.shape[0]))})
        if name in layers and not layers[name]
        else array
        for name, array in stacked.arrays.items()
    }
    labelled = Described(stacked, stacked.info, arrays)
    rows: dict[str, tuple[str, tuple[Extent, ...] | None]] = {}
    for name, array in labelled.arrays.items():
        if name.endswith(_QKV):
            heads = _heads(labelled, name, num_heads)
            for which in "qkv":
                rows[name.replace("wqkv", f"w{which}")] = name, heads.rows(which)
        elif _BOTH in name:
            half = array.shape[-2] // 2
            inner = _array(labelled, name.replace(_BOTH, "down")).shape[-1]
            if half != inner:
                raise InputError(
                    f"--family megatron: {name.removeprefix(MODEL)} has {array.shape[-2]} rows for "
                    f"a hidden size of {inner}: gated_linear_unit must be true (--swiglu)"
                )
            rows[name.replace(_BOTH, "gate")] = name, ((0, half),)
            rows[name.replace(_BOTH, "up")] = name, ((half, 2 * half),)
        else:
            rows[name] = name, None
    made = Rows(labelled, rows)
    return Transposed(made, [name for name in made.arrays if is_expert_matrix(name)])


def _members(source: Source) -> tuple[dict[str, dict[tuple[int, ...], str]], dict[str, list[int]]]:
    """By our array, the source's arrays at every index of its first dims, see :class:`Stacked`;
    and the numbers of its layers, none where one array of the source has all layers."""
    slots: dict[str, dict[tuple[int | None, int | None], str]] = {}
    for name in source.arrays:
        if _NO_WEIGHTS.fullmatch(name):
            continue
        layer, expert, ours = _ours(name)
        names = slots.setdefault(MODEL + ours, {})
        if (layer, expert) in names:
            raise InputError(f"--family megatron: {name} and {names[layer, expert]} are one array")
        names[layer, expert] = name
    members: dict[str, dict[tuple[int, ...], str]] = {}
    layers: dict[str, list[int]] = {}
    for ours, names in slots.items():
        numbers = sorted({layer for layer, _ in names if layer is not None})
        experts = sorted({expert for _, expert in names if expert is not None})
        if ours.startswith(f"{MODEL}layers/"):
            layers[ours] = numbers
        members[ours] = {
            tuple(
                known.index(number)
                for number, known in zip(slot, (numbers, experts), strict=True)
                if number is not None
            ): name
            for slot, name in names.items()
        }
        count = max(1, len(numbers)) * max(1, len(experts))
        if len(names) != count or (experts and experts != list(range(len(experts)))):
            raise InputError(
                f"--family megatron: {min(names.values())} and {len(names) - 1} others do not make "
                f"up {count} tensors of {len(numbers)} layers and {len(experts)} experts"
            )
        _check_alike(source, names.values())
    return members, layers


def _check_alike(source: Source, names: Iterable[str]) -> None:
    kinds: dict[tuple[tuple[int, ...], str], str] = {}
    for name in names:
        array = source.arrays[name]
        kinds.setdefault((array.shape, array.logical_dtype), name)
    if len(kinds) > 1:
        (first, a), (second, b), *_ = kinds.items()
        raise InputError(
            f"--family megatron: {a} is {first[1]} {first[0]} and {b} is {second[1]} {second[0]}: "
            f"layers must be alike"
        )


def _ours(name: str) -> tuple[int | None, int | None, str]:
    """The layer and the expert that a name has, if any, and Convoy's array."""
    if name in _OTHERS:
        return None, None, _OTHERS[name]
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, inner = match.groups()
        expert = None
        of_expert = _EXPERT.fullmatch(inner)
        if of_expert is not None:
            network, expert, matrix = of_expert.groups()
            inner = network + matrix
        if inner in _IN_LAYER:
            numbers = [None if number is None else int(number) for number in (layer, expert)]
            return numbers[0], numbers[1], f"layers/{_IN_LAYER[inner]}"
    for pattern, option, needed in _REFUSED:
        if re.fullmatch(pattern, name):
            raise InputError(
                f"--family megatron: {name} is of a model with {option}; it must be {needed}"
            )
    raise InputError(f"--family megatron: array {name} is of no model that is known")


def _array(source: Source, name: str) -> SourceArray:
    if name not in source.arrays:
        raise InputError(f"--family megatron: SRC has nothing for {name.removeprefix(MODEL)}")
    return source.arrays[name]


def _heads(source: Source, qkv: str, num_heads: int | None) -> _Heads:
    """The heads of the matrix ``qkv``, [L, (H + 2 G) C, D]; that after attention is [L, D, H C]."""
    rows = source.arrays[qkv].shape[-2]
    columns = _array(source, qkv.replace("wqkv", "wo")).shape[-1]
    q_norm = source.arrays.get(qkv.replace("wqkv", "q_norm"))
    if q_norm is not None:
        size = q_norm.shape[-1]
        if num_heads not in (None, columns // size):
            raise InputError(
                f"--num-heads ({num_heads}) must be {columns // size}: heads have {size} numbers, "
                f"and all of them {columns}"
            )
    elif num_heads is None:
        raise InputError(
            f"--num-heads must be given: {columns} numbers of all query heads do not tell how many "
            f"heads there are"
        )
    elif columns % num_heads:
        raise InputError(f"--num-heads ({num_heads}) must divide {columns}, the size of all heads")
    else:
        size = columns // num_heads
    H = columns // size
    G, rest = divmod(rows - columns, 2 * size)
    if columns % size or rest or G < 1 or H % G:
        raise InputError(
            f"--num-heads ({num_heads or H}) must fit linear_qkv of {rows} rows with query heads "
            f"of {columns} numbers: key-value heads would not come out even"
        )
    return _Heads(H, G, size)
