"""Checks that need another checkpoint: one of the same run, or the one that was converted.

Legend: E experts.

Experts of two checkpoints are compared by the correlation of samples of their numbers. Between two
steps of a run it falls slowly; to any other expert it is about 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from convoy.doctor.check import Check, Finding
from convoy.doctor.copies import BLOCKS, TWICE
from convoy.doctor.moments import MISSING, STALE
from convoy.doctor.names import BIAS, DOWN, GATE, MATRICES, MEAN, ROUTER, SQUARE, UP, WEIGHT
from convoy.doctor.order import ORDER
from convoy.doctor.patient import Layer, Patient
from convoy.doctor.structure import BIASES, COUNTS, LAYERS
from convoy.doctor.training import INITIAL, TRANSPOSED, UNTRAINED
from convoy.doctor.vitals import Vitals, correlation, spread

SWAPPED = Check(
    "gate-up-swapped",
    "gate and up are in one another's place",
    "--against",
    (),
    "swap them back: the names w1 and w3, or the halves of gate_up_proj, were mistaken",
)
REPLACED = Check(
    "replaced-experts",
    "experts have nothing in common with those of OTHER, though the rest has",
    "--against",
    ("Megatron-LM#5844",),
    "take these experts from OTHER, or convert again",
)
CHECKS = (SWAPPED, REPLACED)
_SAME, _OTHER = 0.6, 0.3  # correlations
_NOTHING = 0.1  # a correlation of experts that were never the same; tuned ones keep more


class _Match(NamedTuple):
    """What one expert is in the other checkpoint."""

    kind: str
    """``same``, ``moved``, ``turned``, ``swapped``, ``unknown`` or ``unsure``."""
    home: int
    roles: tuple[str, ...]
    score: float


def of_names(patient: Patient, other: Patient) -> Iterator[Finding]:
    """What the other checkpoint has by name and this one lacks."""
    there, here = set(other.moe_layers()), set(patient.moe_layers())
    if there - here:
        evidence = f"{len(here)} layers have experts, in OTHER {len(there)}"
        yield Finding(LAYERS, evidence, tuple(sorted(there - here)))
    for layer in sorted(there & here):
        mine, others = (len(p.experts(layer, DOWN)) for p in (patient, other))
        if mine != others:
            arrays = patient.arrays_of([layer], MATRICES)
            yield Finding(COUNTS, f"{mine} experts, in OTHER {others}", (layer,), (), arrays)
        if other.slot(layer, BIAS) is not None and patient.slot(layer, BIAS) is None:
            yield Finding(BIASES, "the router of OTHER has one", (layer,))
        if not patient.has_moments():
            continue
        for moment in (MEAN, SQUARE):
            for role in (*MATRICES, ROUTER):
                has, had = (
                    bool(p.slot(layer, role, moment) if role == ROUTER
                         else p.experts(layer, role, moment))
                    for p in (patient, other)
                )  # fmt: skip
                if had and not has:
                    yield Finding(MISSING, f"no {moment} of {role}, which OTHER has", (layer,))


def of_layer(patient: Patient, layer: Layer, other: Layer, related: bool) -> Iterator[Finding]:
    """What differs in one layer. ``related`` says that the other weights are of one origin."""
    yield from _stale(patient, layer, other)
    if set(layer.experts) != set(other.experts):
        return
    matches = {e: _match(layer, other, e) for e in layer.experts}
    kinds: dict[str, list[int]] = {}
    for expert, match in matches.items():
        kinds.setdefault(match.kind, []).append(expert)
    known = related or len(kinds.get("same", ())) * 2 >= len(matches)
    arrays = patient.arrays_of([layer.number], MATRICES)
    moved = kinds.get("moved", [])
    if moved:
        yield from _moved(layer, matches, moved, arrays)
    for kind, check in (("turned", TRANSPOSED), ("swapped", SWAPPED)):
        experts = kinds.get(kind, [])
        if experts:
            roles = dict.fromkeys(role for e in experts for role in matches[e].roles)
            least = min(matches[e].score for e in experts)
            evidence = f"{' and '.join(roles)} correlate with OTHER's so, at least {least:.2f}"
            every = len(experts) == len(matches)
            yield Finding(check, evidence, (layer.number,), () if every else tuple(experts), arrays)
    unknown = kinds.get("unknown", [])
    if unknown and known:
        fresh = all(_unlikeness(layer, expert) < UNTRAINED for expert in unknown)
        most = max(matches[e].score for e in unknown)
        evidence = f"correlation {most:.2f} at most with any expert of OTHER"
        if fresh:
            evidence += ", and rows and columns as of random values"
        yield Finding(INITIAL if fresh else REPLACED, evidence, (layer.number,), tuple(unknown),
                      arrays)  # fmt: skip


def _unlikeness(layer: Layer, expert: int) -> float:
    """How far an expert is from random values, in standard deviations."""
    scores = [spread(layer.of(role)[expert]) for role in MATRICES if expert in layer.of(role)]
    return sum(scores) / math.sqrt(max(1, len(scores)))


def is_related(layer: Layer, other: Layer) -> bool:
    """Whether the weights of a layer that are no experts' are near those of the other one."""
    scores = [
        correlation(vitals.sample, other.singles[key].sample)
        for key, vitals in layer.singles.items()
        if key[0] == WEIGHT and key[1] != BIAS and not vitals.constant and key in other.singles
        and other.singles[key].shape == vitals.shape and len(vitals.shape) == 2
    ]  # fmt: skip
    return bool(scores) and float(np.median(scores)) > _SAME


def _match(layer: Layer, other: Layer, expert: int) -> _Match:
    """Where the numbers of an expert are in the other layer."""
    mine = {r: layer.of(r)[expert] for r in MATRICES if expert in layer.of(r)}
    mine = {r: v for r, v in mine.items() if not v.constant and not v.not_finite}
    same = {r: _with(v, other.of(r).get(expert)) for r, v in mine.items()}
    if not same or min(same.values()) > _SAME:
        return _Match("same", expert, (), min(same.values(), default=1.0))
    off = [role for role, score in same.items() if score < _OTHER]
    turned = [r for r in off if _with_turned(mine[r], other.of(r).get(expert)) > _SAME]
    if turned and len(turned) == len(off):
        score = min(_with_turned(mine[r], other.of(r).get(expert)) for r in turned)
        return _Match("turned", expert, tuple(turned), score)
    if set(off) == {GATE, UP}:
        scores = (
            _with(mine[GATE], other.of(UP).get(expert)),
            _with(mine[UP], other.of(GATE).get(expert)),
        )
        if min(scores) > _SAME:
            return _Match("swapped", expert, (GATE, UP), min(scores))
    if not off:
        return _Match("unsure", expert, (), min(same.values()))
    best, score = expert, -1.0
    for candidate in other.experts:
        worst = min(_with(mine[r], other.of(r).get(candidate)) for r in off)
        if worst > score:
            best, score = candidate, worst
    if score > _SAME:
        return _Match("moved", best, tuple(off), score)
    in_common = max(score, *same.values())
    return _Match("unknown" if in_common < _NOTHING else "unsure", best, tuple(off), score)


def _with(vitals: Vitals, other: Vitals | None) -> float:
    if other is None or other.shape != vitals.shape:
        return 0.0
    return correlation(vitals.sample, other.sample)


def _with_turned(vitals: Vitals, other: Vitals | None) -> float:
    if other is None or other.shape != vitals.shape or other.turned_sample is None:
        return 0.0
    return correlation(vitals.sample, other.turned_sample)


def _moved(
    layer: Layer, matches: dict[int, _Match], moved: list[int], arrays: tuple[str, ...]
) -> Iterator[Finding]:
    """Experts in another's place: an order where each is somewhere, copies where some are lost."""
    places = [match.home for match in matches.values() if match.kind in ("moved", "same")]
    lost = len(places) - len(set(places))
    said = ", ".join(f"{e} is OTHER's {matches[e].home}" for e in moved[:4])
    more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
    roles = {role for e in moved for role in matches[e].roles}
    of = "" if roles == set(MATRICES) else f" ({' and '.join(sorted(roles))})"
    numbers = {"places": {str(e): matches[e].home for e in moved}}
    if lost:
        check = BLOCKS if _is_block(matches, moved) else TWICE
        evidence = f"expert {said}{more}{of}; {lost} experts of OTHER are nowhere"
    else:
        check, evidence = ORDER, f"expert {said}{more}{of}"
    yield Finding(check, evidence, (layer.number,), tuple(moved), arrays, numbers)


def _is_block(matches: dict[int, _Match], moved: list[int]) -> bool:
    size = min(moved)
    return len(moved) == len(matches) - size and all(
        matches[e].home == e % size for e in moved if size
    )


def _stale(patient: Patient, layer: Layer, other: Layer) -> Iterator[Finding]:
    """Weights that moved, and moments that did not."""
    kept, compared = 0, 0
    for role in MATRICES:
        for moment in (SQUARE, MEAN):
            mine, others = layer.of(role, moment), other.of(role, moment)
            for expert, vitals in mine.items():
                before = others.get(expert)
                now, then = layer.of(role).get(expert), other.of(role).get(expert)
                if before is None or now is None or then is None or vitals.dead:
                    continue
                if now.digest != then.digest and _with(now, then) > _SAME:
                    compared += 1
                    kept += vitals.digest == before.digest
    if kept and kept * 2 > compared:
        evidence = f"{kept} of {compared} moments are OTHER's bit by bit, of weights that differ"
        arrays = patient.arrays_of([layer.number], MATRICES, SQUARE)
        yield Finding(STALE, evidence, (layer.number,), (), arrays, {"kept": kept, "of": compared})
