"""What a rank wants of a checkpoint: its state and the saved tree, side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ckpt.errors import CheckpointError
from ckpt.format import (
    ArrayRecord,
    Manifest,
    Node,
    PackPlace,
    Path,
    children,
    is_leaf,
    leaf_value,
    shown,
    where,
)
from ckpt.state_dict.held import Ranks, describe, is_dtensor, shard_of


@dataclass(frozen=True)
class _Found:
    """A tensor of the checkpoint, by its name there."""

    name: str


@dataclass(frozen=True)
class _Container:
    """A dict, list or tuple of the state, or a new one, and what its entries will be."""

    old: Any
    kind: str
    entries: dict[Any, Any]


_ABSENT = object()
"""In place of a value that the state lacks."""


@dataclass
class Wanted:
    """What a rank wants of a checkpoint.

    Args:
        ranks: the ranks that load.
        manifest: the checkpoint.
        device: of new tensors.
        ignore: patterns of names; what matches may be in the checkpoint or in the state alone.
    """

    ranks: Ranks
    manifest: Manifest
    device: torch.device | str
    ignore: Sequence[str] = ()
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What is to be filled, by the names in the checkpoint."""
    unused: list[str] = field(default_factory=list)
    """What the checkpoint has and the state lacks, for people."""
    lacking: list[str] = field(default_factory=list)
    """What the state has and the checkpoint lacks, for people."""
    _new: list[tuple[Path, str]] = field(default_factory=list)
    _plan: Any = None

    def match(self, state: dict[Any, Any], tree: Node) -> None:
        """Walk along ``state`` and the saved ``tree``; no value is changed.

        Raises CheckpointError, naming the value, where kinds, shapes or dtypes differ.
        """
        self._plan = self._match_node(state, tree, ())
        by_key: dict[str | int, list[Tensor]] = {}
        for path, tensor in _tensors(state, ()):
            by_key.setdefault(path[-1], []).append(tensor)
        for path, name in self._new:
            self.tensors[name] = self._new_tensor(path, name, by_key)

    def assign(self) -> None:
        """Put everything but the numbers of tensors into the state."""
        self._assigned(self._plan)

    def _assigned(self, plan: Any) -> Any:
        if isinstance(plan, _Found):
            return self.tensors[plan.name]
        if not isinstance(plan, _Container):
            return plan
        values = {key: self._assigned(one) for key, one in plan.entries.items()}
        if plan.kind == "tuple":
            return tuple(values.values())
        if plan.kind == "list":
            entries: list[Any] = plan.old if isinstance(plan.old, list) else []
            entries[:] = values.values()
            return entries
        found: dict[Any, Any] = plan.old if isinstance(plan.old, dict) else {}
        for key, one in values.items():  # not update(): that of a Counter adds
            found[key] = one
        return found

    def _match_node(self, value: Any, node: Node, path: Path) -> Any:
        nothing = value is _ABSENT or value is None
        if "tensor" in node and nothing:
            self._new.append((path, node["tensor"]))
            return _Found(node["tensor"])
        if "tensor" in node and isinstance(value, Tensor):
            return self._tensor(value, node["tensor"], path)
        if "dict" in node and (nothing or isinstance(value, dict)):
            return self._dict(None if nothing else value, node, path)
        if ("list" in node or "tuple" in node) and (nothing or type(value) in (list, tuple)):
            return self._sequence(None if nothing else value, node, path)
        if is_leaf(node) and not isinstance(value, dict | list | tuple | Tensor):
            return leaf_value(node)
        raise CheckpointError(
            f"{where(path)} is a {type(value).__name__}, and {shown(node)} in the checkpoint"
        )

    def _dict(self, value: dict[Any, Any] | None, node: Node, path: Path) -> _Container:
        saved = dict(children(node))
        entries = {}
        for key, one in saved.items():
            if not value or key in value:
                old = value[key] if value else _ABSENT
                entries[key] = self._match_node(old, one, (*path, key))
            else:
                self.unused += self._told(_ends(one, (*path, key)))
        self.lacking += self._told((*path, key) for key in value or () if key not in saved)
        return _Container(value, "dict", entries)

    def _told(self, paths: Iterable[Path]) -> list[str]:
        """Paths for people, without those that a pattern ignores."""
        return [
            where(path)
            for path in paths
            for name in ["/".join(map(str, path))]
            # With / at its end, as a container of what the pattern ignores.
            if not any(fnmatchcase(one, p) for p in self.ignore for one in (name, f"{name}/"))
        ]

    def _sequence(self, value: Any, node: Node, path: Path) -> _Container:
        nodes = dict(children(node))
        if value and len(value) != len(nodes):
            raise CheckpointError(
                f"{where(path)} has {len(value)} entries, and {len(nodes)} in the checkpoint"
            )
        old = value or [_ABSENT] * len(nodes)
        entries = {i: self._match_node(old[i], one, (*path, i)) for i, one in nodes.items()}  # type: ignore[index]
        kind = (
            "tuple" if isinstance(value, tuple) or (value is None and "tuple" in node) else "list"
        )
        return _Container(value, kind, entries)

    def _tensor(self, tensor: Tensor, name: str, path: Path) -> _Found:
        shape, dtype = self._record(name)
        found = str(tensor.dtype).removeprefix("torch.")
        for what, a, b in (("shape", tuple(tensor.shape), shape), ("dtype", found, dtype)):
            if a != b:
                raise CheckpointError(f"{where(path)} has {what} {a}, and {b} in the checkpoint")
        describe(path, tensor, self.ranks, check=False)
        if tensor.is_meta:
            tensor = _like(tensor, tensor.dtype, self.device)
        self.tensors[name] = tensor
        return _Found(name)

    def _record(self, name: str) -> tuple[tuple[int, ...], str]:
        found = self.manifest.tensors.get(name)
        if found is None:
            raise CheckpointError(f"the manifest's state names {name}, and there is no such array")
        if isinstance(found, PackPlace):
            return found.tensor.shape, found.pack.logical_dtype
        return found.shape, found.logical_dtype

    def _new_tensor(self, path: Path, name: str, by_key: dict[str | int, list[Tensor]]) -> Tensor:
        """A new tensor, like the one whose key is part of ``path`` and whose shape is equal."""
        shape, logical_dtype = self._record(name)
        dtype = getattr(torch, logical_dtype)
        for part in path:
            for twin in by_key.get(part, ()):
                if tuple(twin.shape) == shape:
                    return _like(twin, dtype, self.device)
        # On one rank a state of plain tensors takes a whole one; DTensors mix with no plain tensor.
        shards = self.ranks.world > 1 or any(map(is_dtensor, chain(*by_key.values())))
        if shards and _is_cut(self.manifest.tensors[name]):
            raise CheckpointError(
                f"{where(path)} is a DTensor in the checkpoint, and the state has no tensor that "
                f"says how to cut it: make it first, as "
                f"torch.distributed.checkpoint.state_dict.get_state_dict does with moments"
            )
        return torch.empty(shape, dtype=dtype, device=self.device)


def _is_cut(found: ArrayRecord | PackPlace) -> bool:
    placements = found.placements if isinstance(found, ArrayRecord) else found.tensor.placements
    return any(placement is not None for placement in placements)


def _like(twin: Tensor, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A new tensor of a dtype with the shape, the mesh and the placements of ``twin``."""
    if not is_dtensor(twin):
        place = device if twin.is_meta else twin.device
        return torch.empty(twin.shape, dtype=dtype, device=place)
    from torch.distributed.tensor import DTensor

    assert isinstance(twin, DTensor)
    shard = shard_of(twin)
    place = twin.device_mesh.device_type if shard.is_meta else shard.device
    return DTensor.from_local(
        torch.empty(shard.shape, dtype=dtype, device=place),
        twin.device_mesh,
        twin.placements,
        run_check=False,
        shape=twin.shape,
        stride=twin.stride(),
    )


def _tensors(value: Any, path: Path) -> Iterator[tuple[Path, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, one in entries:
            yield from _tensors(one, (*path, key))


def _ends(node: Node, path: Path) -> Iterator[Path]:
    """The paths of all tensors and values of a tree."""
    if "tensor" in node or is_leaf(node):
        yield path
    for key, one in children(node):
        yield from _ends(one, (*path, key))
