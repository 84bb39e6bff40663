"""Sources for a reshard: their format, and which of their arrays are taken under which names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.errors import CheckpointError
from ckpt.format import (
    TREE,
    Node,
    dotted_names,
    read_manifest,
    renamed,
    renamed_tree,
    tensor_names,
)
from ckpt.interop import DcpSource, SafetensorsSource, is_dcp, is_safetensors
from ckpt.rewrite import (
    CheckpointSource,
    Converted,
    Described,
    Selected,
    Source,
    Stacked,
    changed,
)
from pretrain.errors import InputError
from pretrain.state import array_path, split_layer, tokenizer_of, weight_names

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def open_source(location: str, step: int | None = None) -> Source:
    """A checkpoint, a torch.distributed.checkpoint folder, or safetensors.

    Arrays of other projects get names and shapes as Convoy has them, see :func:`adopted`. A folder
    that a reshard wrote has a description of its arrays, and is taken as it is.

    Raises CheckpointError where the location is none of the three, or cannot be read.
    """
    path = Path(location)
    foreign: DcpSource | SafetensorsSource
    if is_dcp(path):
        foreign = DcpSource(path)
    elif is_safetensors(path):
        foreign = SafetensorsSource(path)
    else:
        return CheckpointSource(location, read_manifest(location, step))
    if step is not None:
        raise InputError(f"--step ({step}) is for checkpoint folders; {path} holds one step alone")
    if TREE in foreign.info.state:  # a reshard wrote it, with dots in the names
        names = dotted_names(foreign.info.state[TREE])
        return Selected(foreign, {name: dotted for dotted, name in names.items()})
    return foreign if foreign.described else adopted(foreign)


def adopted(source: Source) -> Source:
    """Arrays of ``layers.0.norm.weight`` and so on stacked to ``layers/norm/weight`` [L, ...].

    Dots become slashes. Layers whose arrays differ in shape or dtype stay single. The attribute
    ``layers`` has the layers' numbers, as in a checkpoint.
    """
    names = {array_path(name): name for name in source.arrays}
    if len(names) != len(source.arrays):
        raise CheckpointError("two names of arrays differ in . and / alone: rename one")
    stacks: dict[str, dict[int, str]] = {}
    single = []
    for path in names:
        stacked, layer = split_layer(path)
        if layer is None:
            single.append(path)
        else:
            stacks.setdefault(stacked, {})[layer] = path
    members: dict[str, dict[tuple[int, ...], str]] = {path: {(): names[path]} for path in single}
    attributes = {}
    for stacked, of in stacks.items():
        layers = sorted(of)
        kinds = {
            (array.shape, array.logical_dtype)
            for array in (source.arrays[names[path]] for path in of.values())
        }
        if len(kinds) > 1 or stacked in names:
            members |= {path: {(): names[path]} for path in of.values()}
        else:
            members[stacked] = {(i,): names[of[layer]] for i, layer in enumerate(layers)}
            attributes[stacked] = {"layers": layers}
    return Stacked(source, members, attributes)


def with_names(source: Source, rename: Mapping[str, str]) -> Source:
    """Arrays under other names, see :func:`ckpt.format.renamed`. A state dict's keys follow."""
    if not rename:
        return source
    tree = source.info.state.get(TREE)
    if tree is None:
        return Selected(source, renamed(source.arrays, rename))
    tree, names = renamed_tree(tree, rename)
    return _with_tree(Selected(source, names), tree)


def with_dots(source: Source) -> Source:
    """The tensors of a state dict under the names that other formats have: keys joined by dots."""
    tree = source.info.state.get(TREE)
    return source if tree is None else Selected(source, dotted_names(tree))


def _with_tree(source: Source, tree: Node | None) -> Source:
    state = {key: value for key, value in source.info.state.items() if key != TREE}
    if tree is not None:
        state[TREE] = tree
    return Described(source, changed(replace(source.info, state=state), tree))


def weights_only(source: Source) -> Source:
    """Only the parameters and buffers, which are what ``init.checkpoint`` reads; see
    :func:`pretrain.state.weight_names`. Of a state dict, what the key ``model`` has.

    Raises InputError where nothing is left, and for a state dict without such a key.
    """
    tree = source.info.state.get(TREE)
    state = {"weights_of": source.info.identity, **tokenizer_of(source.info.state)}
    if tree is not None:
        model = [one for one in tree["dict"] if one[0] == "model"]
        names = list(tensor_names({"dict": model}))
        if not names:
            keys = ", ".join(str(key) for key, _ in tree["dict"])
            raise InputError(
                f"SRC has no weights under the key model: its keys are {keys}; name them with "
                f"--rename KEY/=model/"
            )
        state[TREE] = {"dict": model}
    else:
        names = weight_names(list(source.arrays))
    if not names:
        raise InputError(
            "SRC has no weights: every array of it is an optimizer's or a random state"
        )
    picked = Selected(source, {name: name for name in names})
    return Described(picked, replace(picked.info, state=state))


def in_dtype(source: Source, dtype: str) -> Source:
    """Floating weights in another dtype of :data:`DTYPES`.

    Experts' biases stay in float32: in bfloat16 other experts would be chosen.
    """
    names = [name for name in weight_names(list(source.arrays)) if not name.endswith("expert_bias")]
    return Converted(source, names, DTYPES[dtype])
