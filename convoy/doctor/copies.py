"""Checks for copies: one rank's experts in the place of all, single experts twice, layers twice.

Equal experts are no corruption by themselves. An upcycled model begins with them, and what no token
has come to stays equal. So copies are named only where training cannot have left them:

- their second moments are equal and not zero, and their rows of the router differ: the experts got
  other tokens, and cannot have the same mean of squared gradients;
- or the experts of the layer have nothing in common but the copies, as experts have that were
  initialized apart, and the router was trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from convoy.doctor.check import Check, Finding, ranges
from convoy.doctor.names import GATE, MATRICES, MEAN, MOMENTUM, ROUTER, SQUARE, UP, WEIGHT
from convoy.doctor.patient import Layer, Patient
from convoy.doctor.vitals import correlation, kinship, spread

BLOCKS = Check(
    "copied-block",
    "the experts of one rank are in the places of all",
    "equal experts at equal distances, and a router that was trained or moments",
    ("KempnerForge#202", "UniRL#158", "transformers#45662", "DeepSpeed#6589"),
    "the other ranks' experts are lost in this file: save again from all ranks",
)
TWICE = Check(
    "duplicated-expert",
    "experts are bit by bit the same",
    "equal experts, and a router that was trained or moments",
    (),
    "compare with the checkpoint before the conversion, and convert again",
)
LAYER_TWICE = Check(
    "copied-layer",
    "the experts of a layer are those of another layer",
    "equal experts in two layers whose routers differ, and not in all layers",
    (),
    "pipeline stages were saved under one another's numbers: save again",
)
CHECKS = (BLOCKS, TWICE, LAYER_TWICE)
_TRAINED = 6.0  # standard deviations of a router's spread
_APART = 0.1  # correlation of experts that were initialized apart
_PAIRS = 64
_ALL_MOMENTS = (SQUARE, MOMENTUM, MEAN)


class Copies:
    """Equal experts of each layer; judged after all were seen, for the routers speak together."""

    def __init__(self) -> None:
        self._certain: dict[int, str] = {}
        self._apart: dict[int, str] = {}
        self._groups: dict[int, list[list[int]]] = {}
        self._blocks: dict[int, tuple[tuple[int, ...], int | None]] = {}
        self._spreads: list[float] = []

    def add(self, layer: Layer) -> None:
        """Remember a layer."""
        router, rows = layer.singles.get((WEIGHT, ROUTER)), layer.rows.get(WEIGHT)
        if router is not None and rows is not None and not router.not_finite:
            self._spreads.append((spread(router) + kinship(rows)) / math.sqrt(2.0))
        groups = [group for group in equal_experts(layer).values() if len(group) > 1]
        if not groups:
            return
        self._groups[layer.number] = groups
        self._blocks[layer.number] = layer.experts, _block_size(layer, layer.experts)
        certain, apart = _cannot_be(layer, groups)
        if certain is not None:
            self._certain[layer.number] = certain
        elif apart is not None:
            self._apart[layer.number] = apart

    def find(self, patient: Patient) -> Iterator[Finding]:
        """The copies that training cannot have left."""
        score = sum(self._spreads) / math.sqrt(max(1, len(self._spreads)))
        reasons = dict(self._certain)
        if score > _TRAINED:
            for number, why in self._apart.items():
                reasons[number] = (
                    f"{why}, and the routers were trained ({score:.0f} standard deviations from "
                    f"initial values)"
                )
        for number, why in reasons.items():
            yield self._finding(patient, number, why)

    def _finding(self, patient: Patient, number: int, why: str) -> Finding:
        arrays = patient.arrays_of([number], MATRICES)
        experts, size = self._blocks[number]
        if size is not None:
            copied = tuple(e for e in experts if e >= size)
            evidence = (
                f"experts {ranges(copied)} are experts {ranges(range(size))} again, "
                f"{len(experts)} experts in {len(experts) // size} blocks of {size}; {why}"
            )
            numbers = {"experts": len(experts), "block": size}
            return Finding(BLOCKS, evidence, (number,), copied, arrays, numbers)
        groups = self._groups[number]
        said = "; ".join(f"{ranges(group)} are one" for group in groups)
        evidence = f"{said}, of {len(experts)} experts; {why}"
        alike = tuple(sorted(expert for group in groups for expert in group))
        return Finding(TWICE, evidence, (number,), alike, arrays)


def equal_experts(layer: Layer) -> dict[tuple[bytes, ...], list[int]]:
    """The experts by the digests of all their matrices; those of constant matrices are left out."""
    groups: dict[tuple[bytes, ...], list[int]] = {}
    for expert in layer.experts:
        mine = [layer.of(role)[expert] for role in MATRICES if expert in layer.of(role)]
        if all(vitals.constant for vitals in mine[:2]) or any(v.not_finite for v in mine):
            continue
        groups.setdefault(tuple(vitals.digest for vitals in mine), []).append(expert)
    return groups


def _block_size(layer: Layer, experts: Sequence[int]) -> int | None:
    """The least size of blocks of which each is the first one again; None without such."""
    keys = {e: key for key, group in equal_experts(layer).items() for e in group}
    order = [keys.get(e) for e in experts]
    for size in range(1, len(order)):
        if len(order) % size == 0 and order[size:] == order[:-size] and None not in order:
            return size
    return None


def _cannot_be(layer: Layer, groups: Sequence[Sequence[int]]) -> tuple[str | None, str | None]:
    """Why training cannot have left these experts equal, and why it cannot where routers were
    trained; None where it can."""
    rows = layer.rows.get(WEIGHT)
    if rows is None:
        return None, None
    pairs = [pair for group in groups for pair in combinations(group, 2)]
    apart = [
        (a, b) for a, b in pairs
        if max(a, b) < len(rows) and not np.array_equal(rows[a], rows[b])
    ]  # fmt: skip
    if not apart:
        return None, None  # the router, too, was duplicated: nothing of the model has changed
    moments = next((m for m in _ALL_MOMENTS if layer.of(GATE, m)), None)
    if moments is not None:
        of = layer.of(GATE, moments)
        live = [(a, b) for a, b in apart if a in of and b in of and not (of[a].dead or of[b].dead)]
        same = [(a, b) for a, b in live if of[a].digest == of[b].digest]
        if same:
            why = (
                f"{moments} of {same[0][0]} and {same[0][1]} are equal too and not zero, though "
                f"their rows of the router differ"
            )
            return why, None
        if all(vitals.dead for vitals in of.values()):
            return None, None  # nothing here was ever updated
    common = in_common(layer)
    if common is not None and common < _APART:
        return None, f"the other experts have nothing in common (correlation {common:.2f})"
    return None, None


def in_common(layer: Layer) -> float | None:
    """The median correlation of experts that are not equal; None without two such experts, or where
    their matrices are too small to tell."""
    groups = [group[0] for group in equal_experts(layer).values()]
    pairs = list(combinations(groups, 2))[:: max(1, len(groups) * (len(groups) - 1) // 2 // _PAIRS)]
    values = []
    for a, b in pairs:
        for role in (GATE, UP):
            of = layer.of(role)
            if a in of and b in of and of[a].shape == of[b].shape:
                if 4 / math.sqrt(of[a].sample.size) > 3 * _APART:
                    return None
                values.append(abs(correlation(of[a].sample, of[b].sample)))
    return float(np.median(values)) if values else None


class LayerCopies:
    """Layers whose experts are those of another layer, found after all of them were seen."""

    def __init__(self) -> None:
        self._experts: dict[int, tuple[tuple[bytes, ...], ...]] = {}
        self._rest: dict[int, dict[str, bytes]] = {}

    def add(self, layer: Layer) -> None:
        """Remember the digests of a layer."""
        groups = equal_experts(layer)
        if not groups:
            return
        keys = {e: key for key, group in groups.items() for e in group}
        self._experts[layer.number] = tuple(keys.get(e, ()) for e in layer.experts)
        self._rest[layer.number] = {
            role: v.digest for (what, role), v in layer.singles.items()
            if what == WEIGHT and not v.constant
        }  # fmt: skip

    def find(self, patient: Patient) -> Iterator[Finding]:
        """The copies."""
        groups: dict[tuple[tuple[bytes, ...], ...], list[int]] = {}
        for number, key in self._experts.items():
            groups.setdefault(key, []).append(number)
        if len(groups) == 1:
            return  # one expert layer for all layers, as in models that share their weights
        for group in groups.values():
            first = group[0]
            copies = [n for n in group[1:] if self._differ(first, n)]
            if copies:
                evidence = (
                    f"all experts of layer {ranges(copies)} are those of layer {first}, and the "
                    f"other weights of these layers differ"
                )
                arrays = patient.arrays_of(copies, MATRICES)
                yield Finding(LAYER_TWICE, evidence, tuple(copies), (), arrays)

    def _differ(self, a: int, b: int) -> bool:
        """Whether the router differs: of layers that are copies as a whole a deeper model may have
        been made."""
        mine, other = self._rest[a].get(ROUTER), self._rest[b].get(ROUTER)
        return mine is not None and other is not None and mine != other
