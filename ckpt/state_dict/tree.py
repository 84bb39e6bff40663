"""A nested state as JSON and named tensors; :mod:`ckpt.format.state_tree` has what JSON."""

from __future__ import annotations

import base64
import math
from typing import Any

from torch import Tensor

from ckpt.errors import CheckpointError
from ckpt.format import Node, Path, name_of, shown, where

_TAKEN = "tensors, numbers, strings, bytes, None, and dicts, lists and tuples of these"


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
        raise CheckpointError(f"{where(path)} is not valid Unicode") from None


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
