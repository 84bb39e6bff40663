"""A nested state as JSON and named tensors, and back.

The JSON of a state has a node for each value:

- ``{"tensor": NAME}``
- ``{"dict": [[KEY, NODE], ...]}``, keys are strings or ints, in order
- ``{"list": [NODE, ...]}`` and ``{"tuple": [NODE, ...]}``
- ``{"value": X}``: a string, an int, a bool, None or a finite float
- ``{"float": "nan" | "inf" | "-inf"}`` and ``{"bytes": BASE64}``

A tensor's name is its keys joined by ``/``: ``model/layers.0.wq.weight``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from typing import Any, TypeAlias

from torch import Tensor

from ckpt.errors import CheckpointError
from ckpt.format import PACKS

Node: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""

_PART_BYTES = 200
_TAKEN = "tensors, numbers, strings, bytes, None, and dicts, lists and tuples of these"


def where(path: Path) -> str:
    """A path for people: ``state['optim']['lr']``."""
    return "state" + "".join(f"[{key!r}]" for key in path)


def flatten(state: dict[Any, Any]) -> tuple[Node, dict[str, tuple[Path, Tensor]]]:
    """The JSON of a state, and its tensors by name.

    Raises CheckpointError, naming the value, for anything that is not stored.
    """
    tensors: dict[str, tuple[Path, Tensor]] = {}
    return _flat(state, (), tensors), tensors


def _flat(value: Any, path: Path, tensors: dict[str, tuple[Path, Tensor]]) -> Node:
    if isinstance(value, Tensor):
        name = name_of(path)
        if name in tensors:
            other = where(tensors[name][0])
            raise CheckpointError(f"{where(path)} and {other} have one name, {name}: rename a key")
        tensors[name] = path, value
        return {"tensor": name}
    if isinstance(value, dict):
        for key in value:
            if type(key) not in (str, int):
                raise CheckpointError(f"{where(path)} has the key {key!r}: keys are str or int")
            _check_text(key, (*path, key))
        return {"dict": [[key, _flat(one, (*path, key), tensors)] for key, one in value.items()]}
    if type(value) in (list, tuple):
        of = [_flat(one, (*path, i), tensors) for i, one in enumerate(value)]
        return {type(value).__name__: of}
    return _leaf(value, path)


def _leaf(value: Any, path: Path) -> Node:
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}
    if type(value) is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if value is None or type(value) in (str, int, bool, float):
        _check_text(value, path)
        return {"value": value}
    kind = type(value)
    raise CheckpointError(
        f"{where(path)} is a {kind.__module__}.{kind.__qualname__}: only {_TAKEN} can be saved"
    )


def _check_text(value: Any, path: Path) -> None:
    try:
        str(value).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{where(path)} has half of a surrogate pair: no text") from None


def leaf_value(node: Node) -> Any:
    """The value of a node that is neither a tensor nor a container."""
    if "float" in node:
        return float(node["float"])
    return base64.b64decode(node["bytes"]) if "bytes" in node else node["value"]


def is_leaf(node: Node) -> bool:
    """Whether a node is neither a tensor nor a container."""
    return not {"tensor", "dict", "list", "tuple"} & node.keys()


def children(node: Node) -> Iterator[tuple[str | int, Node]]:
    """The keys and the nodes in a container."""
    if "dict" in node:
        yield from ((key, one) for key, one in node["dict"])
    else:
        yield from enumerate(node["list"] if "list" in node else node.get("tuple", []))


def name_of(path: Path) -> str:
    """The name of the tensor at ``path``. Parts that no array may have are percent-encoded."""
    parts = [_part(str(key)) for key in path]
    if parts and parts[0] == PACKS:  # the group of the packs
        parts[0] = f"%{ord(PACKS[0]):02X}{PACKS[1:]}"
    for part in parts:
        if len(part.encode()) > _PART_BYTES:
            raise CheckpointError(
                f"{where(path)}: a key has more than {_PART_BYTES} bytes, the most that a file "
                f"name takes; rename it"
            )
    return "/".join(parts)


def _part(key: str) -> str:
    if not key:
        return "%"
    coded = "".join(
        one if one.isprintable() and one not in "/\\%" else _percent(one) for one in key
    )
    if coded in (".", "..", "zarr.json") or coded.startswith("__"):
        return _percent(coded[0]) + coded[1:]
    return coded


def _percent(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode())


def dotted_names(node: Node, path: Path = ()) -> dict[str, str]:
    """The name of every tensor of a tree by its keys joined by dots, as
    torch.distributed.checkpoint and safetensors files name tensors."""
    if "tensor" in node:
        return {".".join(map(str, path)): node["tensor"]}
    found: dict[str, str] = {}
    for key, one in children(node):
        found |= dotted_names(one, (*path, key))
    return found


def merged(trees: list[tuple[int, Node]], path: Path = ()) -> Node:
    """One tree of the trees of several ranks, each with its rank.

    Dicts are united; everything else must be equal. Raises CheckpointError, naming the value and
    the ranks, where two ranks differ.
    """
    (first, one), *rest = trees
    for rank, other in rest:
        if "dict" in one and "dict" in other:
            continue
        alike = other.keys() == one.keys()
        if alike and ("list" in one or "tuple" in one):
            kind = next(iter(one))
            alike = len(one[kind]) == len(other[kind])
        elif alike:
            alike = other == one
        if not alike:
            raise CheckpointError(
                f"{where(path)} is {shown(one)} on rank {first} and {shown(other)} on rank {rank}: "
                f"it must be equal, or under a key of its own for each rank"
            )
    if "dict" in one:
        keys: dict[str | int, list[tuple[int, Node]]] = {}
        for rank, tree in trees:
            for key, node in tree["dict"]:
                keys.setdefault(key, []).append((rank, node))
        return {"dict": [[key, merged(of, (*path, key))] for key, of in keys.items()]}
    if "list" in one or "tuple" in one:
        kind = next(iter(one))
        columns = zip(*([(r, n) for n in tree[kind]] for r, tree in trees), strict=True)
        return {kind: [merged(list(of), (*path, i)) for i, of in enumerate(columns)]}
    return one


def shown(node: Node) -> str:
    """What a node is, for people."""
    if not is_leaf(node):
        return f"a {next(iter(node))}"
    text = repr(leaf_value(node))
    return text if len(text) <= 40 else f"{text[:40]}..."
