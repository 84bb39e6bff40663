"""A checkpoint under examination: its parts by name, its counters, and its numbers layer by layer.

Legend: L layers, E experts, D d_model, F d_ff.

Memory holds the float32 numbers of one expert's matrix, or a block of one array of at most 64 MiB,
and of one layer what :class:`convoy.doctor.vitals.Vitals` keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ckpt.format import to_float32
from ckpt.rewrite import Source, row_major_boxes
from convoy.doctor.names import (
    BIAS,
    COUNT,
    MATRICES,
    MEAN,
    MOMENTUM,
    ROUTER,
    SQUARE,
    WEIGHT,
    Part,
    Slot,
    matrix_shape,
    slots_of,
)
from convoy.doctor.vitals import Values, Vitals, examine

BLOCK = 64 << 20
"""Bytes that are read at once, where a single matrix is not larger."""
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_COUNTERS = ("float32", "float64", "int64", "int32")


@dataclass(frozen=True)
class Declared:
    """What a checkpoint says of itself, beside its arrays; None where it says nothing."""

    form: str = "a checkpoint"
    """The kind of checkpoint, for people."""
    experts: int | None = None
    layers: int | None = None
    moe_layers: tuple[int, ...] | None = None
    """The numbers of the layers with experts."""
    biased: bool = False
    """Whether routers have a bias for each expert."""
    bias_limit: float | None = None
    """What no bias can exceed: the rate of its updates times the steps."""
    step: int | None = None
    updates: int | None = None
    """What the optimizer counts for all parameters together."""
    exact_steps: bool = False
    """Whether this trainer counts an update of the optimizer in every step."""
    in_out: bool = False
    """Whether ``gate_up_proj`` is stored as [E, in, out]."""
    moments_expected: bool = False
    """Whether a checkpoint of this kind always has moments."""


@dataclass
class Layer:
    """The vitals of one layer: by what and role, those of the experts, or of the one matrix."""

    number: int
    matrices: dict[tuple[str, str], dict[int, Vitals]] = field(default_factory=dict)
    singles: dict[tuple[str, str], Vitals] = field(default_factory=dict)
    """Of matrices that are no experts' and of vectors."""
    rows: dict[str, Values] = field(default_factory=dict)
    """The router's numbers [E, D] by what they are."""
    bias: Values | None = None

    def of(self, role: str, what: str = WEIGHT) -> dict[int, Vitals]:
        """Vitals of the experts' matrices of one role, by expert."""
        return self.matrices.get((what, role), {})

    @property
    def experts(self) -> tuple[int, ...]:
        """The experts that have any matrix."""
        return tuple(sorted({e for role in MATRICES for e in self.of(role)}))


class Patient:
    """The arrays of a source as parts of a mixture of experts.

    Args:
        source: arrays under their trainer's names.
        declared: what else is known.
    """

    def __init__(self, source: Source, declared: Declared) -> None:
        self.source, self.declared = source, declared
        self.slots: dict[Part, Slot] = {}
        self.names: dict[str, str] = {}
        for name, array in source.arrays.items():
            read = slots_of(name, array, declared.in_out)
            if read is None:
                continue
            parameter, slots = read
            self.names[name] = parameter
            self.slots.update(slots)
        self._block: tuple[tuple[str, tuple[int, ...]], Values] | None = None

    # What there is, by name.

    def layers(self, what: str = WEIGHT) -> tuple[int, ...]:
        """The numbers of all layers that have anything."""
        return tuple(
            sorted({p.layer for p in self.slots if p.what == what and p.layer is not None})
        )

    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts' matrices or a router."""
        roles = {*MATRICES, ROUTER}
        layers = {p.layer for p in self.slots if p.what == WEIGHT and p.role in roles}
        return tuple(sorted(layer for layer in layers if layer is not None))

    def experts(self, layer: int, role: str, what: str = WEIGHT) -> dict[int, Slot]:
        """The slots of one role in a layer, by expert."""
        return {
            key.expert: slot
            for key, slot in self._in_layer(layer).items()
            if (key.what, key.role) == (what, role) and key.expert is not None
        }

    def slot(self, layer: int, role: str, what: str = WEIGHT) -> Slot | None:
        """The slot of what a layer has once."""
        return self.slots.get(Part(what, role, layer, None))

    def has_moments(self) -> bool:
        """Whether there is a second moment, or the momentum, of anything."""
        return any(key.what in (MEAN, SQUARE, MOMENTUM) for key in self.slots)

    def _in_layer(self, layer: int) -> Mapping[Part, Slot]:
        if not hasattr(self, "_layers"):
            self._layers: dict[int, dict[Part, Slot]] = {}
            for key, slot in self.slots.items():
                if key.layer is not None:
                    self._layers.setdefault(key.layer, {})[key] = slot
        return self._layers.get(layer, {})

    def counts(self) -> dict[str, float]:
        """The updates that the optimizer has counted, by parameter, where it counts them."""
        counted = {}
        if self.declared.updates is not None:
            counted["the optimizer"] = float(self.declared.updates)
        for key, slot in self.slots.items():
            array = self.source.arrays[slot.array]
            if key.what == COUNT and array.logical_dtype in _COUNTERS and array.shape in ((), (1,)):
                values = self.source.read_box(slot.array, tuple((0, n) for n in array.shape))
                counted[self.names[slot.array]] = float(values.reshape(-1)[0])
        return counted

    # What is in it.

    def read(self, slot: Slot) -> Values:
        """A slot's numbers as float32: [in, out] of a matrix of an expert, else as stored.

        Raises CheckpointError where numbers are missing or damaged.
        """
        array = self.source.arrays[slot.array]
        shape = array.shape[len(slot.index) :]
        cut = len(slot.index)
        size = math.prod(shape) * array.dtype.itemsize
        while cut and size * array.shape[cut - 1] <= BLOCK:
            cut -= 1
            size *= array.shape[cut]
        key = slot.array, slot.index[:cut]
        if self._block is None or self._block[0] != key:
            self._block = None
            box = (*((i, i + 1) for i in slot.index[:cut]), *((0, n) for n in array.shape[cut:]))
            values = self.source.read_box(slot.array, box).reshape(array.shape[cut:])
            self._block = key, values
        chosen = np.ascontiguousarray(self._block[1][slot.index[cut:]])
        numbers = to_float32(chosen, array.logical_dtype)
        if slot.turned and numbers.ndim == 2:
            numbers = numbers.T
        if slot.half is not None and numbers.ndim == 2:
            half = numbers.shape[1] // 2
            numbers = numbers[:, :half] if slot.half == 0 else numbers[:, half:]
        return numbers

    def examined(self, number: int) -> Layer:
        """The vitals of one layer. Raises CheckpointError as :meth:`read` does."""
        layer = Layer(number)
        for key, slot in sorted(self._in_layer(number).items(), key=_by_array):
            dtype = self.source.arrays[slot.array].logical_dtype
            if key.what == COUNT or dtype not in _FLOATS:
                continue
            if key.role in MATRICES and key.expert is not None:
                if len(slot.shape) == 2:
                    turned = slot.turned
                    vitals = examine(self.read(slot), dtype, turned=turned)
                    layer.matrices.setdefault((key.what, key.role), {})[key.expert] = vitals
                continue
            if math.prod(slot.shape) * 4 > 2 * BLOCK:
                continue  # scanned in slabs, see scan
            values = self.read(slot)
            layer.singles[key.what, key.role] = examine(
                values if values.ndim in (1, 2) else values.reshape(-1), dtype
            )
            if key.role == ROUTER and values.ndim == 2:
                layer.rows[key.what] = values
            if key.role == BIAS and key.what == WEIGHT:
                layer.bias = values
        return layer

    def outside(self) -> Iterator[tuple[Part, Slot, int, int, int]]:
        """Of arrays of no layer, and of those too large for a layer's vitals: part, slot, the
        numbers that are not finite, the zeros, and how many there are."""
        for key, slot in self.slots.items():
            array = self.source.arrays[slot.array]
            large = math.prod(slot.shape) * 4 > 2 * BLOCK and key.expert is None
            if key.what == COUNT or array.logical_dtype not in _FLOATS:
                continue
            if key.layer is not None and not large:
                continue
            bad = zeros = 0
            for box in row_major_boxes(slot.shape, array.dtype.itemsize, BLOCK):
                lead = tuple((i, i + 1) for i in slot.index)
                raw = self.source.read_box(slot.array, (*lead, *box))
                values = to_float32(np.ascontiguousarray(raw), array.logical_dtype)
                bad += int(values.size - np.isfinite(values).sum())
                zeros += int(values.size - np.count_nonzero(values))
            yield key, slot, bad, zeros, math.prod(slot.shape)

    def shapes(self, layer: int, role: str, what: str = WEIGHT) -> dict[int, tuple[int, ...]]:
        """The shape of each expert's matrix as [in, out]."""
        return {e: matrix_shape(slot) for e, slot in self.experts(layer, role, what).items()}

    def arrays_of(self, layers: Any, roles: Any, what: str = WEIGHT) -> tuple[str, ...]:
        """The names of the arrays that have some roles of some layers."""
        names = [
            slot.array
            for layer in layers
            for key, slot in self._in_layer(layer).items()
            if key.what == what and key.role in roles
        ]
        return tuple(dict.fromkeys(names))


def _by_array(item: tuple[Part, Slot]) -> tuple[str, tuple[int, ...], int]:
    slot = item[1]
    return slot.array, slot.index, slot.half or 0
