"""Loading a state dict, on any number of ranks and with any placements."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from ckpt.errors import CheckpointError
from ckpt.format import (
    TREE,
    ArrayRecord,
    Manifest,
    Node,
    PackPlace,
    committed_steps,
    locate,
    manifest_key,
    read_manifest,
)
from ckpt.local_array import ArraySpec, LocalArray
from ckpt.read import load
from ckpt.state_dict.held import Ranks, is_dtensor, layout_of
from ckpt.state_dict.packed_row import PackedRow
from ckpt.state_dict.packing import parts_at, pieces
from ckpt.state_dict.wanted import Wanted
from ckpt.store import Location, Store, open_store
from parallel.layout import Box, box_shape, intersect, within
from parallel.placements import MeshLayout, RankMesh

_WAVE_BYTES = 256 << 20
"""Bytes of rows of packs that are read at a time, into memory of their own."""


def load_state_dict(
    root: Location,
    state: dict[str, Any],
    *,
    step: int | None = None,
    strict: bool = True,
    ignore: Sequence[str] = (),
    process_group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> int:
    """Fill a state in place from a checkpoint of :func:`save_state_dict`; every rank calls.

    The tensors of ``state`` say which slices this rank needs: the checkpoint may have been saved on
    any number of ranks, with any placements. Tensors are filled in place. Numbers, strings, bytes
    and None are replaced in their dict or list. An empty dict or list takes all that the checkpoint
    has there, and None takes a tensor: the state of an optimizer that has made no step is filled.
    New tensors are made on ``device``; a new tensor becomes a DTensor like the tensor of ``state``
    whose key is part of its path and whose shape is equal, as the parameter of a moment is in the
    names of ``get_state_dict``. A tensor on the meta device is replaced by a new tensor in its
    dict, for ``load_state_dict(..., assign=True)`` of a module.

    Only tensors share memory with a model and its optimizer, and an optimizer that has made no step
    has none: give the filled state to their ``load_state_dict``, or to ``set_state_dict``.

    Args:
        root: the checkpoint folder or store, or the path of a manifest.
        state: what to fill.
        step: which checkpoint; None for the newest one that every rank has.
        strict: whether it is an error that the checkpoint has a value that no rank asked for, or
            that ``state`` has a value that the checkpoint lacks. Without ``strict`` the former is
            ignored, and the latter stays as it is.
        ignore: patterns for ``strict``, such as ``["rng/*"]``: keys joined by ``/`` that may be in
            one of the two alone. Keys with a rank in them need it on another number of ranks.
        process_group: the ranks that load; None for all. One process needs no process group.
        device: of new tensors that are no DTensors; None for the default device.

    Returns:
        The step of the checkpoint.

    Raises:
        CheckpointError: on every rank. Before any value is changed: where there is no such
            checkpoint, and where keys, shapes or dtypes differ. Later: where an object is missing
            or damaged; the tensors hold unverified numbers then.
    """
    if step is not None and type(step) is not int:
        raise CheckpointError(f"step ({step!r}) must be a whole number, or None for the newest")
    ranks, what = Ranks(process_group), "the state cannot be loaded"
    try:
        root, step = locate(root, step)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    store = open_store(root)
    step = _newest(store, ranks) if step is None else step
    with ranks.together(what):
        manifest = read_manifest(store, step)
        wanted = Wanted(ranks, manifest, device or torch.get_default_device(), ignore)
        wanted.match(state, _tree(store, manifest))
        if strict:
            _refuse_stray(wanted.lacking, "the checkpoint lacks")
    if strict:
        # A pipeline stage asks for a part: what no rank asks for is an error.
        nobody = set.intersection(*ranks.gather(set(wanted.unused)))
        _refuse_stray(sorted(nobody), "the state lacks")
    with ranks.together(what):
        _read(store, manifest, wanted.tensors, ranks)
    wanted.assign()
    return manifest.step


def _newest(store: Store, ranks: Ranks) -> int | None:
    """The newest step that every rank has; None where there is none, for the error that follows.

    Ranks may have stores of their own, as the memory of each node.
    """
    try:
        steps = set(committed_steps(store))
    except CheckpointError:
        steps = set()
    every = ranks.gather(steps)
    common = set.intersection(*every)
    if not common and any(every):
        raise CheckpointError(
            f"no step in {store.where()} is on every rank; this rank has {sorted(steps)}"
        )
    return max(common) if common else None


def _tree(store: Store, manifest: Manifest) -> Node:
    tree = manifest.state.get(TREE)
    if not isinstance(tree, dict) or "dict" not in tree:
        raise CheckpointError(
            f"checkpoint {store.where(manifest_key(manifest.step))} was not saved by "
            f"save_state_dict: load its arrays with ckpt.load, or read them with ckpt.open"
        )
    return tree


def _refuse_stray(names: list[str], what: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise CheckpointError(
            f"{what} {names[0]}{more}; ignore=[...] names what may differ, "
            f"and strict=False loads what both have"
        )


@dataclass(frozen=True)
class _Slices:
    """This rank's slices of a tensor that is to be filled: boxes, and the part of the local shard
    in each. ``slot`` is None on a rank that holds nothing."""

    layout: MeshLayout
    slot: int | None
    boxes: list[Box]
    pieces: list[Tensor]

    @classmethod
    def of(cls, tensor: Tensor, ranks: Ranks) -> _Slices:
        """A plain tensor is whole on this rank."""
        if is_dtensor(tensor):
            layout = layout_of(tensor, ranks)
        else:
            layout = MeshLayout(tuple(tensor.shape), RankMesh((1,), (ranks.rank,)), (None,))
        return cls(layout, layout.slot(ranks.rank), *pieces(layout, tensor, ranks.rank))


_Placed: TypeAlias = list[tuple[PackPlace, _Slices]]
"""The tensors of one pack that this rank fills, or a part of these tensors."""


def _read(store: Store, manifest: Manifest, tensors: dict[str, Tensor], ranks: Ranks) -> None:
    own, packed = list[LocalArray](), dict[str, _Placed]()
    for name, tensor in tensors.items():
        found, slices = manifest.tensors[name], _Slices.of(tensor, ranks)
        if isinstance(found, PackPlace):
            packed.setdefault(found.pack.name, []).append((found, slices))
        else:
            own.append(LocalArray(_spec(found), slices.boxes, slices.pieces))
    waves: list[list[_Rows]] = [[]]
    for placed in packed.values():
        direct = _direct(placed)
        if direct is not None:
            own.append(direct)
            continue
        rows = _Rows(placed)
        if waves[-1] and sum(one.nbytes for one in (*waves[-1], rows)) > _WAVE_BYTES:
            waves.append([])
        waves[-1].append(rows)
    for i, wave in enumerate(waves):
        arrays = [*(own if i == 0 else []), *(rows.array for rows in wave)]
        load(store, manifest, arrays, extra="ignore")  # `strict` is checked, of all ranks' names
        for rows in wave:
            rows.scatter()


def _direct(placed: _Placed) -> LocalArray | None:
    """A pack's row to be read into the tensors themselves; None where the slices are not those of
    one slot, and where the tensors are not contiguous in host memory."""
    slots = set()
    for place, slices in placed:
        layout, saved = slices.layout, place.layout
        cut = layout.num_slots > 1 or saved.num_slots > 1
        alike = layout.placements == saved.placements and layout.mesh.shape == saved.mesh.shape
        if slices.slot is None or (cut and not alike):
            return None
        slots.add(slices.slot)
    parts = [
        part
        for place, slices in placed
        for part in parts_at(place.tensor.start, slices.boxes, slices.pieces)
    ]
    if len(slots) > 1 or not all(one.is_cpu and one.is_contiguous() for _, one in parts):
        return None
    return PackedRow(_spec(placed[0][0].pack), slots.pop(), sorted(parts, key=itemgetter(0)))


class _Rows:
    """The rows of one pack that hold any part of this rank's slices, in memory of their own."""

    def __init__(self, placed: _Placed) -> None:
        self.placed = placed
        pack = placed[0][0].pack
        self.slots = [
            slot
            for slot in range(pack.shape[0])
            if any(any(_common(place, slot, slices.boxes)) for place, slices in placed)
        ]
        spec, length = _spec(pack), pack.shape[1]
        self.buffers = [torch.empty(1, length, dtype=spec.dtype) for _ in self.slots]
        boxes = [((slot, slot + 1), (0, length)) for slot in self.slots]
        self.array = LocalArray(spec, boxes, self.buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def scatter(self) -> None:
        """Copy the numbers to the tensors."""
        for place, slices in self.placed:
            for slot, buffer in zip(self.slots, self.buffers, strict=True):
                for (at, held), box, common in _common(place, slot, slices.boxes):
                    shape = box_shape(held)
                    part = buffer[0, at : at + math.prod(shape)].view(shape)
                    target = slices.pieces[slices.boxes.index(box)]
                    target[within(common, box)].copy_(part[within(common, held)])


def _common(
    place: PackPlace, slot: int, boxes: list[Box]
) -> Iterator[tuple[tuple[int, Box], Box, Box]]:
    """What a slot of a pack and some boxes of a tensor have in common: the stored box with its
    place in the row, the wanted box, and the common part."""
    for at, held in place.boxes(slot):
        for box in boxes:
            common = intersect(held, box)
            if common is not None:
                yield (at, held), box, common


def _spec(record: ArrayRecord) -> ArraySpec:
    return ArraySpec(
        name=record.name,
        shape=record.shape,
        dtype=getattr(torch, record.logical_dtype),
        splits=record.splits,
        attributes=record.attributes,
    )
