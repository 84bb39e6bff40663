"""Checks of single numbers: not finite, experts and rows of zeros, biases that cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from convoy.doctor.check import Check, Finding
from convoy.doctor.names import BIAS, DOWN, GATE, MATRICES, ROUTER, SQUARE, UP, WEIGHT
from convoy.doctor.patient import Layer, Patient

NOT_FINITE = Check(
    "not-finite",
    "numbers are NaN or infinite",
    "the numbers",
    (),
    "go back to the last checkpoint without them",
)
ZEROS = Check(
    "zero-experts",
    "experts, or rows of theirs, are zeros where their siblings are not",
    "other experts of the layer",
    (),
    "the tensors were made and never filled: convert or save again",
)
DRIFT = Check(
    "bias-drift",
    "an expert's bias is larger than its updates can have made it",
    "the rate of the biases' updates and the step, which a Convoy checkpoint has",
    ("torchtitan#1304",),
    "take the biases of an older checkpoint; they were updated twice, or belong to another run",
)
CHECKS = (NOT_FINITE, ZEROS, DRIFT)


def of_layer(patient: Patient, layer: Layer) -> Iterator[Finding]:
    """What the numbers of one layer show."""
    yield from _not_finite(patient, layer)
    yield from _zeros(patient, layer)
    yield from _drift(patient, layer)


def _not_finite(patient: Patient, layer: Layer) -> Iterator[Finding]:
    for (what, role), of in layer.matrices.items():
        bad = {expert: vitals for expert, vitals in of.items() if vitals.not_finite}
        if bad:
            count = sum(vitals.not_finite for vitals in bad.values())
            total = sum(vitals.size for vitals in bad.values())
            evidence = f"{count:,} of {total:,} numbers of {what} of {role}"
            arrays = tuple(
                dict.fromkeys(patient.experts(layer.number, role, what)[e].array for e in bad)
            )
            yield Finding(NOT_FINITE, evidence, (layer.number,), tuple(sorted(bad)), arrays,
                          {"count": count})  # fmt: skip
    for (what, role), vitals in layer.singles.items():
        if vitals.not_finite:
            evidence = f"{vitals.not_finite:,} of {vitals.size:,} numbers of {what} of {role}"
            arrays = patient.arrays_of([layer.number], [role], what)
            yield Finding(NOT_FINITE, evidence, (layer.number,), (), arrays,
                          {"count": vitals.not_finite})  # fmt: skip


def outside(patient: Patient) -> Iterator[Finding]:
    """The numbers of arrays of no layer."""
    for key, slot, bad, _, total in patient.outside():
        if bad:
            layers = () if key.layer is None else (key.layer,)
            evidence = f"{bad:,} of {total:,} numbers"
            yield Finding(NOT_FINITE, evidence, layers, (), (slot.array,), {"count": bad})


def _zeros(patient: Patient, layer: Layer) -> Iterator[Finding]:
    """Matrices of zeros that other experts have filled, and rows of the router.

    Some trainers begin with down, or with the router, as zeros: what no token has come to since
    is zero in a healthy model. There the second moment must say that it was updated.
    """
    filled = {role for role in MATRICES if any(not v.dead for v in layer.of(role).values())}
    hollow: dict[str, list[int]] = {}
    for role in filled:
        for expert, vitals in layer.of(role).items():
            if vitals.dead and (role != DOWN or _was_updated(layer, role, expert)):
                hollow.setdefault(role, []).append(expert)
    if hollow:
        experts = tuple(sorted({e for of in hollow.values() for e in of}))
        said = ", ".join(f"{role} of {len(of)}" for role, of in hollow.items())
        evidence = f"all numbers of {said} of {len(layer.experts)} experts"
        yield Finding(ZEROS, evidence, (layer.number,), experts,
                      patient.arrays_of([layer.number], hollow))  # fmt: skip
    router = layer.singles.get((WEIGHT, ROUTER))
    square = layer.singles.get((SQUARE, ROUTER))
    if router is not None and square is not None and not router.dead:
        rows = router.zero_ins - square.zero_ins
        if rows:
            evidence = f"{len(rows)} of {router.shape[0]} rows of the router, which were updated"
            yield Finding(ZEROS, evidence, (layer.number,), tuple(sorted(rows)),
                          patient.arrays_of([layer.number], [ROUTER]))  # fmt: skip
    yield from _lost_units(patient, layer)


def _was_updated(layer: Layer, role: str, expert: int) -> bool:
    square = layer.of(role, SQUARE).get(expert)
    return square is not None and not square.dead


def _lost_units(patient: Patient, layer: Layer) -> Iterator[Finding]:
    """Hidden units that one matrix of an expert has as zeros and another has not.

    A pruned or padded unit is zero in gate, up and down alike, or in all experts.
    """
    gates, ups, downs = layer.of(GATE), layer.of(UP), layer.of(DOWN)
    if not (gates and downs):
        return
    units = {
        GATE: {e: v.zero_outs for e, v in gates.items() if not v.dead},
        UP: {e: v.zero_outs for e, v in ups.items() if not v.dead},
        DOWN: {e: v.zero_ins for e, v in downs.items() if not v.dead},
    }
    for role, of in units.items():
        shared = frozenset.intersection(*of.values()) if of else frozenset()
        for expert, zeros in of.items():
            others = [units[other].get(expert) for other in units if other != role]
            pruned = frozenset.union(*(o for o in others if o is not None), frozenset())
            lost = zeros - pruned - shared
            if lost:
                evidence = (
                    f"{len(lost)} of {layer.of(role)[expert].shape[role != DOWN]} hidden units "
                    f"are zero in {role} and not in the other matrices"
                )
                arrays = (patient.experts(layer.number, role)[expert].array,)
                yield Finding(ZEROS, evidence, (layer.number,), (expert,), arrays,
                              {"units": len(lost)})  # fmt: skip


def _drift(patient: Patient, layer: Layer) -> Iterator[Finding]:
    limit = patient.declared.bias_limit
    if limit is None or layer.bias is None:
        return
    above = np.flatnonzero(np.abs(layer.bias) > limit)
    if above.size:
        largest = float(np.abs(layer.bias[above]).max())
        evidence = f"{largest:.4g}, and the steps so far make {limit:.4g} at most"
        yield Finding(DRIFT, evidence, (layer.number,), tuple(above.tolist()),
                      patient.arrays_of([layer.number], [BIAS]), {"largest": largest,
                                                                  "limit": limit})  # fmt: skip
