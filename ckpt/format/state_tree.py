"""The JSON of a saved state dict: a tree with a node for each value.

- ``{"tensor": NAME}``
- ``{"dict": [[KEY, NODE], ...]}``, keys are strings or ints, in order
- ``{"list": [NODE, ...]}`` and ``{"tuple": [NODE, ...]}``
- ``{"value": X}``: a string, an int, a bool, None or a finite float
- ``{"float": "nan" | "inf" | "-inf"}`` and ``{"bytes": BASE64}``

A tensor's name is its keys joined by ``/``: ``model/layers.0.wq.weight``.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

from ckpt.errors import CheckpointError
from ckpt.format.names import renamed
from ckpt.format.packed import PACKS

Node: TypeAlias = dict[str, Any]
Path: TypeAlias = tuple[str | int, ...]
"""The keys and indexes that lead to a value."""

_PART_BYTES = 200


def where(path: Path) -> str:
    """A path for people: ``state['optim']['lr']``."""
    return "state" + "".join(f"[{key!r}]" for key in path)


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


def tensor_names(node: Node) -> Iterator[str]:
    """The names of all tensors of a tree, in order."""
    if "tensor" in node:
        yield node["tensor"]
    for _, one in children(node):
        yield from tensor_names(one)


def dotted_names(tree: Node) -> dict[str, str]:
    """The name of every tensor of a tree by its keys joined by dots, as
    torch.distributed.checkpoint and safetensors files name tensors.

    Raises CheckpointError where two tensors get one name.
    """
    found: dict[str, str] = {}

    def walk(node: Node, path: Path) -> None:
        for key, one in children(node):
            walk(one, (*path, key))
        if "tensor" not in node:
            return
        dotted, name = ".".join(map(str, path)), node["tensor"]
        if dotted in found:
            raise CheckpointError(
                f"{found[dotted]} and {name} have one name with dots, {dotted}: rename one"
            )
        found[dotted] = name

    walk(tree, ())
    return found


def renamed_tree(tree: Node, rename: Mapping[str, str]) -> tuple[Node, dict[str, str]]:
    """A tree whose keys follow rules for names, and each tensor's old name by its new one.

    The rules are those of :func:`ckpt.format.renamed`. A value that is no tensor has a name too,
    its keys joined by ``/``. A list is renamed as a whole.

    Raises CheckpointError, as ``renamed`` does, and where a new name is not that of any keys.
    """
    units = list(_units(tree, ()))
    names = [_unit_name(path, node) for path, node in units]
    inner = [name for _, node in units if "tensor" not in node for name in tensor_names(node)]
    new_of = {old: new for new, old in renamed([*names, *inner], rename).items()}
    moved: Node = {"dict": []}
    for name, (path, node) in zip(names, units, strict=True):
        new = new_of[name].rstrip("/")
        keys = _keys(new, path)
        if name_of(keys) != new:
            raise CheckpointError(f"rename gives {new}: no keys of a state have this name")
        for one in tensor_names(node):
            if new_of[one] != new + one[len(name.rstrip("/")) :]:
                raise CheckpointError(f"{where(path)} must be renamed as a whole: it is a list")
        _insert(moved, keys, _with_names(node, new_of))
    return moved, {new_of[name]: name for name in tensor_names(tree)}


def _units(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    """What dicts of a tree have: tensors, values, lists and empty dicts, each with its keys."""
    if "dict" not in node or not node["dict"]:
        yield path, node
        return
    for key, one in node["dict"]:
        yield from _units(one, (*path, key))


def _unit_name(path: Path, node: Node) -> str:
    # The / at the end of a container's name lets the rule for a prefix take it too.
    return name_of(path) + ("" if "tensor" in node or is_leaf(node) else "/")


def _keys(name: str, old: Path) -> Path:
    """The keys that have a name; parts at either end that are as they were keep their keys, such as
    whole numbers."""
    parts, were = name.split("/"), name_of(old).split("/")
    keys: list[str | int] = ["" if part == "%" else unquote(part) for part in parts]
    for order in (range(len(parts)), range(-1, -len(parts) - 1, -1)):
        for i in order:
            if not -len(old) <= i < len(old) or parts[i] != were[i]:
                break
            keys[i] = old[i]
    return tuple(keys)


def _insert(tree: Node, keys: Path, node: Node) -> None:
    at = tree
    for i, key in enumerate(keys):
        found = next((one for other, one in at["dict"] if str(other) == str(key)), None)
        last = i == len(keys) - 1
        if found is not None and (last or "dict" not in found):
            raise CheckpointError(f"rename gives two values the keys of {where(keys)}")
        if found is None:
            found = node if last else {"dict": []}
            at["dict"].append([key, found])
        at = found


def _with_names(node: Node, new_of: Mapping[str, str]) -> Node:
    if "tensor" in node:
        return {"tensor": new_of[node["tensor"]]}
    for kind in ("list", "tuple"):
        if kind in node:
            return {kind: [_with_names(one, new_of) for one in node[kind]]}
    if "dict" in node:
        return {"dict": [[key, _with_names(one, new_of)] for key, one in node["dict"]]}
    return node


def shown(node: Node) -> str:
    """What a node is, for people."""
    if not is_leaf(node):
        return f"a {next(iter(node))}"
    text = repr(leaf_value(node))
    return text if len(text) <= 40 else f"{text[:40]}..."
