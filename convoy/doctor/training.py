"""Checks of what training leaves in matrices: experts that were never trained, matrices that were
transposed.

Legend: E experts, D d_model, F d_ff; profiles are mean squares of rows or columns.

The mean of squared gradients of a matrix is nearly a product of what comes in and what goes back:
exp_avg_sq[i, o] ~ a[i] b[o]. Gate and up of an expert have the same inputs as the row of its
router, and the same hidden units as down. So profiles that belong to one another correlate, and
those of a transposed matrix correlate with the wrong side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from convoy.doctor.check import Check, Finding
from convoy.doctor.names import DOWN, GATE, MATRICES, ROUTER, SQUARE, UP, WEIGHT
from convoy.doctor.patient import Layer, Patient
from convoy.doctor.vitals import Values, fisher, spread

INITIAL = Check(
    "initial-values",
    "experts are at random values, and their siblings are trained",
    "the same ranks' experts in two layers or more, or all experts beside trained weights; for "
    "single experts --against",
    ("Megatron-LM#5844",),
    "these experts were never loaded: convert again, and check names and ranks of the experts",
)
TRANSPOSED = Check(
    "transposed",
    "matrices have rows and columns swapped",
    "shapes; of square matrices second moments, or weights of many trained experts, or --against",
    ("transformers#47031", "unsloth-zoo#849", "slime#1840"),
    "transpose them, and repair the conversion that goes by shapes",
)
CHECKS = (INITIAL, TRANSPOSED)
UNTRAINED, _TRAINED = 4.5, 12.0
"""Standard deviations of an expert from random values, at most and at least."""
_LEAST_SIDE = 8
_SURE = 8.0  # standard deviations for the wrong side
_SHARE = 0.35  # of them, at most for the right side


class _Sides(NamedTuple):
    """The profiles of a matrix: on the side of the model's width, and on that of hidden units."""

    model: Values
    hidden: Values

    def turned(self) -> _Sides:
        return _Sides(self.hidden, self.model)


def of_shapes(patient: Patient) -> Iterator[Finding]:
    """Matrices whose shapes are swapped. The router says which side is the model's."""
    for layer in patient.moe_layers():
        router = patient.slot(layer, ROUTER)
        if router is None or len(router.shape) != 2:
            continue
        D = router.shape[1]
        for role in MATRICES:
            side = 1 if role == DOWN else 0
            wrong = {
                e: shape for e, shape in patient.shapes(layer, role).items()
                if len(shape) == 2 and shape[side] != D and shape[1 - side] == D
            }  # fmt: skip
            if wrong:
                shape = next(iter(wrong.values()))
                evidence = f"{role} is [in, out] {list(shape)}, and the model's width is {D}"
                slots = patient.experts(layer, role)
                arrays = tuple(dict.fromkeys(slots[e].array for e in wrong))
                every = len(wrong) == len(slots)
                yield Finding(TRANSPOSED, evidence, (layer,), () if every else tuple(wrong), arrays)


# ------------------------------------------------------------------------------------------------
# Experts at initial values.


class Untrained:
    """How far each expert is from random values in each layer; judged after all were seen."""

    def __init__(self) -> None:
        self._scores: dict[int, dict[int, float]] = {}
        self._others: list[float] = []
        self._updated: set[int] = set()
        self._with_moments = False

    def add(self, layer: Layer) -> None:
        """Remember a layer."""
        scores = {}
        for role in MATRICES:
            for expert, square in layer.of(role, SQUARE).items():
                self._with_moments = True
                if not square.dead:
                    self._updated.add(expert)
        self._others += [
            spread(vitals)
            for (what, role), vitals in layer.singles.items()
            if what == WEIGHT and role != ROUTER and len(vitals.shape) == 2
            and min(vitals.shape) >= _LEAST_SIDE and not vitals.not_finite
        ]  # fmt: skip
        for expert in layer.experts:
            of = [layer.of(role)[expert] for role in MATRICES if expert in layer.of(role)]
            if any(vitals.not_finite or vitals.dead for vitals in of):
                return
            scores[expert] = sum(map(spread, of)) / math.sqrt(len(of))
        if scores:
            self._scores[layer.number] = scores

    def find(self, patient: Patient) -> Iterator[Finding]:
        """The same share of ranks in all layers, as no router chooses by itself; or all experts."""
        layers = tuple(self._scores)
        experts = tuple(self._scores[layers[0]]) if layers else ()
        if len(layers) < 2 or any(tuple(of) != experts for of in self._scores.values()):
            return
        scale = math.sqrt(len(layers))
        pooled = {e: sum(of[e] for of in self._scores.values()) / scale for e in experts}
        fresh = frozenset(e for e in experts if pooled[e] < UNTRAINED)
        rest = [pooled[e] for e in experts if e not in fresh]
        if len(fresh) == len(experts):
            yield from self._all(patient, layers, experts)
            return
        size = _ranks(fresh, len(experts))
        worst = max((of[e] for of in self._scores.values() for e in fresh), default=0.0)
        if size is None or not rest or min(rest) < _TRAINED or worst > 2 * UNTRAINED:
            return
        if self._with_moments and not fresh & self._updated:
            return  # no token has come to any of them: they are as they began
        high, low = min(rest), max(pooled[e] for e in fresh)
        evidence = (
            f"the same {len(fresh)} of {len(experts)} experts, whole ranks of {size}, in all "
            f"{len(layers)} layers: at most {low:.1f} standard deviations from random values over "
            f"the layers, the others at least {high:.0f}"
        )
        arrays = patient.arrays_of(layers, MATRICES)
        numbers = {"fresh": low, "trained": high, "rank": size}
        yield Finding(INITIAL, evidence, layers, tuple(sorted(fresh)), arrays, numbers)

    def _all(
        self, patient: Patient, layers: tuple[int, ...], experts: tuple[int, ...]
    ) -> Iterator[Finding]:
        """All experts of all layers, where the other matrices were trained."""
        of_experts = [score for of in self._scores.values() for score in of.values()]
        total = sum(of_experts) / math.sqrt(len(of_experts))
        others = sum(self._others) / math.sqrt(max(1, len(self._others)))
        frozen = self._with_moments and not self._updated
        if frozen or total > UNTRAINED or others < _TRAINED:
            return
        evidence = (
            f"all {len(of_experts)} experts together are {total:.1f} standard deviations from "
            f"random values, the {len(self._others)} other matrices of these layers {others:.0f}"
        )
        arrays = patient.arrays_of(layers, MATRICES)
        yield Finding(INITIAL, evidence, layers, experts, arrays,
                      {"fresh": total, "trained": others})  # fmt: skip


def _ranks(fresh: frozenset[int], count: int) -> int | None:
    """The largest rank of at least two experts of which the set has whole ones."""
    for size in range(count // 2 if len(fresh) > 1 else 0, 1, -1):
        blocks = [set(range(first, first + size)) for first in range(0, count, size)]
        if count % size == 0 and fresh == set().union(*(b for b in blocks if b <= fresh)):
            return size
    return None


# ------------------------------------------------------------------------------------------------
# Transposed matrices.


class Turned:
    """Evidence for and against each way of transposing, over all layers, of weights or of second
    moments."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pooled: dict[str, list[tuple[float, float]]] = {}
        self._single: dict[str, dict[int, dict[int, tuple[float, float]]]] = {}
        self._layers: set[int] = set()

    def add(self, layer: Layer) -> None:
        """Compare the profiles of each expert."""
        what = self._what
        rows = layer.rows.get(what) if what == SQUARE else None
        self._layers.add(layer.number)
        means = _mean_sides(layer, what)
        for expert in layer.experts:
            sides = _sides_of(layer, what, expert)
            row = None
            if rows is not None and rows.ndim == 2 and expert < len(rows):
                row = rows[expert]
            for way, pairs in _ways(sides, row, means).items():
                scored = [(r, w) for r, w in pairs if r or w]
                if not scored:
                    continue
                scale = math.sqrt(len(scored))
                total = sum(r for r, _ in scored) / scale, sum(w for _, w in scored) / scale
                self._pooled.setdefault(way, []).append(total)
                self._single.setdefault(way, {}).setdefault(layer.number, {})[expert] = total

    def find(self, patient: Patient) -> Iterator[Finding]:
        """The way that explains the most, over the whole checkpoint or for single experts."""
        best = None
        for way, totals in self._pooled.items():
            scale = math.sqrt(len(totals))
            right, wrong = sum(r for r, _ in totals) / scale, sum(w for _, w in totals) / scale
            if _is_wrong(right, wrong) and (best is None or wrong > best[1]):
                best = way, wrong, right
        if best is not None:
            way, wrong, right = best
            yield _turned(patient, tuple(sorted(self._layers)), (), way, right, wrong)
            return
        for layer in sorted(self._layers):
            worst: dict[int, tuple[str, float, float]] = {}
            for way, layers in self._single.items():
                for expert, (right, wrong) in layers.get(layer, {}).items():
                    if _is_wrong(right, wrong) and wrong > worst.get(expert, ("", 0.0, 0.0))[2]:
                        worst[expert] = way, right, wrong
            for expert, (way, right, wrong) in worst.items():
                yield _turned(patient, (layer,), (expert,), way, right, wrong)


def _is_wrong(right: float, wrong: float) -> bool:
    return wrong >= _SURE and right <= _SHARE * wrong


def _turned(
    patient: Patient, layers: tuple[int, ...], experts: tuple[int, ...], way: str,
    right: float, wrong: float,
) -> Finding:  # fmt: skip
    roles = way.split("+")
    evidence = (
        f"{' and '.join(roles)}: rows are to columns of the expert's other matrices and of the "
        f"router's row as columns should be, {wrong:.1f} standard deviations; as stored {right:.1f}"
    )
    numbers = {"swapped": wrong, "as_stored": right}
    return Finding(TRANSPOSED, evidence, layers, experts, patient.arrays_of(layers, roles), numbers)


def _sides_of(layer: Layer, what: str, expert: int) -> dict[str, _Sides]:
    sides = {}
    for role in MATRICES:
        vitals = layer.of(role, what).get(expert)
        if vitals is None or len(vitals.shape) != 2 or vitals.dead or vitals.not_finite:
            continue
        first, second = (vitals.outs, vitals.ins) if role == DOWN else (vitals.ins, vitals.outs)
        sides[role] = _Sides(first, second)
    return sides


def _mean_sides(layer: Layer, what: str) -> dict[str, tuple[_Sides, int]]:
    """By role the sums of log profiles over the experts that are not equal, and their count."""
    seen: set[bytes] = set()
    sums: dict[str, list[_Sides]] = {}
    for expert in layer.experts:
        for role, sides in _sides_of(layer, what, expert).items():
            digest = layer.of(role, what)[expert].digest
            if digest not in seen:
                seen.add(digest)
                sums.setdefault(role, []).append(sides)
    return {
        role: (
            _Sides(sum(_log(s.model) for s in of), sum(_log(s.hidden) for s in of)),  # type: ignore[arg-type]
            len(of),
        )
        for role, of in sums.items()
    }


def _log(profile: Values) -> Values:
    logs: Values = np.log(np.maximum(profile, 1e-38))
    return logs


def _ways(
    sides: Mapping[str, _Sides], row: Values | None, means: Mapping[str, tuple[_Sides, int]]
) -> dict[str, list[tuple[float, float]]]:
    """By the roles that may be transposed, pairs of evidence: for as stored, and for swapped."""
    if set(sides) != set(MATRICES):
        return {}
    gate, up, down = (sides[role] for role in MATRICES)
    ways: dict[str, list[tuple[float, float]]] = {}
    if gate.model.size == gate.hidden.size:
        for role, other in ((GATE, up), (UP, gate)):
            mine = sides[role]
            ways[role] = [
                _pair(mine.model, mine.hidden, other.model),
                _pair(mine.hidden, mine.model, other.hidden),
                _pair(mine.hidden, mine.model, down.hidden),
            ]
        ways[DOWN] = [
            _pair(down.hidden, down.model, gate.hidden), _pair(down.hidden, down.model, up.hidden)
        ]  # fmt: skip
        both = [
            _pair(gate.hidden, gate.model, down.hidden), _pair(up.hidden, up.model, down.hidden)
        ]  # fmt: skip
        if row is not None:
            routed = [_pair(gate.model, gate.hidden, row), _pair(up.model, up.hidden, row)]
            ways[f"{GATE}+{UP}"] = both + routed
            ways["+".join(MATRICES)] = routed
        else:
            ways[f"{GATE}+{UP}"] = both
            ways["+".join(MATRICES)] = [
                (_agreement(m.model, *_rest(means, role, m, "model")),
                 _agreement(m.hidden, *_rest(means, role, m, "hidden")))
                for role, m in sides.items()
            ]  # fmt: skip
    if gate.model.size == 2 * gate.hidden.size:
        # Gate and up in one square matrix [D, 2F]: transposed, the rows are hidden units.
        F = gate.hidden.size
        model, hidden = gate.model + up.model, np.concatenate([gate.hidden, up.hidden])
        ways[f"{GATE}+{UP}"] = [
            _pair(gate.hidden, model[:F], down.hidden), _pair(up.hidden, model[F:], down.hidden)
        ]  # fmt: skip
        if row is not None:
            ways[f"{GATE}+{UP}"].append(_pair(model, hidden, row))
    return ways


def _pair(right: Values, wrong: Values, reference: Values) -> tuple[float, float]:
    return fisher(right, reference), fisher(wrong, reference)


def _rest(
    means: Mapping[str, tuple[_Sides, int]], role: str, mine: _Sides, side: str
) -> tuple[Values, int]:
    total, count = means[role]
    return getattr(total, side) - _log(getattr(mine, side)), count


def _agreement(mine: Values, rest: Values, count: int) -> float:
    """With what the other experts have in common; none without two others."""
    return fisher(mine, rest) if count > 2 else 0.0
