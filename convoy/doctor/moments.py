"""Checks of the optimizer's state: moments that are missing, of another step, or cut off."""

from __future__ import annotations

import math
from collections.abc import Iterator

from convoy.doctor.check import Check, Finding, ranges
from convoy.doctor.names import (
    COUNT,
    MASTER,
    MATRICES,
    MEAN,
    MOMENTUM,
    SQUARE,
    WEIGHT,
    plain_parameter,
)
from convoy.doctor.patient import Layer, Patient

MISSING = Check(
    "missing-moments",
    "moments of the optimizer are not there",
    "moments of other matrices of the same experts, or a step above 0",
    ("Automodel#1325", "Automodel#2088", "AReaL#1468"),
    "a resume would begin with zeros: take older moments, or warm the rate up",
)
STALE = Check(
    "stale-moments",
    "moments are of another step than the weights",
    "the step of the weights and the optimizer's own, or an older checkpoint with --against",
    ("Automodel#1325",),
    "take weights and moments of one step",
)
CUT = Check(
    "truncated-moments",
    "the optimizer's state ends too soon",
    "shapes of moments and weights, or second moments with zeros from one number on to the end",
    ("Megatron-LM#5077",),
    "save again; a resume from this checkpoint trains with wrong moments",
)
ROUNDED = Check(
    "rounded-master",
    "the optimizer's float32 weights are numbers of bfloat16",
    "float32 weights with second moments that are not zero, after 2 steps or more",
    ("Megatron-LM#1359", "OpenTau#185"),
    "the low bits of the weights are lost: resume from a checkpoint that has them",
)
CHECKS = (MISSING, STALE, CUT, ROUNDED)
_MOMENTS = (MEAN, SQUARE, MOMENTUM)
_LEAST = 256  # numbers of a matrix that are all of bfloat16 by no chance
_FEW_SKIPPED = 64  # steps that a loss scaler may have left out


def find(patient: Patient) -> Iterator[Finding]:
    """What names, shapes and counters alone show."""
    yield from _missing(patient)
    cut = list(_shapes(patient))
    yield from cut or _fewer_experts(patient)
    yield from _stale(patient)


def step_of(patient: Patient) -> int:
    """The steps that the checkpoint has behind it, as far as it says so."""
    counted = [int(count) for count in patient.counts().values()]
    return max([patient.declared.step or 0, *counted])


def _missing(patient: Patient) -> Iterator[Finding]:
    if not patient.has_moments():
        if patient.declared.moments_expected:
            step = patient.declared.step
            yield Finding(MISSING, f"no moment of anything at step {step}")
        return
    for layer in patient.moe_layers():
        for moment in _MOMENTS:
            have = {role: set(patient.experts(layer, role, moment)) for role in MATRICES
                    if patient.experts(layer, role)}  # fmt: skip
            every = set().union(*have.values()) if have else set()
            for role, of in have.items():
                lacking = every - of
                if lacking:
                    others = ", ".join(r for r in have if not every - have[r]) or "other matrices"
                    evidence = f"no {moment} of {role}, and one of {others}"
                    arrays = patient.arrays_of([layer], [role])
                    experts = () if lacking == every else tuple(sorted(lacking))
                    yield Finding(MISSING, evidence, (layer,), experts, arrays)
        if _pairs_expected(patient):
            for role in MATRICES:
                first = set(patient.experts(layer, role, MEAN))
                second = set(patient.experts(layer, role, SQUARE))
                if first and second and first ^ second:
                    evidence = f"{len(first)} exp_avg and {len(second)} exp_avg_sq of {role}"
                    yield Finding(MISSING, evidence, (layer,), tuple(sorted(first ^ second)))
    if _pairs_expected(patient):
        yield from _unpaired(patient)


def _pairs_expected(patient: Patient) -> bool:
    return any(key.what == SQUARE for key in patient.slots)


def _unpaired(patient: Patient) -> Iterator[Finding]:
    """All of one moment is gone from the experts, where other parameters have both."""
    for layer in patient.moe_layers():
        counts = {m: sum(bool(patient.experts(layer, r, m)) for r in MATRICES)
                  for m in (MEAN, SQUARE)}  # fmt: skip
        if sorted(counts.values())[0] == 0 and max(counts.values()) > 0:
            lost = min(counts, key=lambda moment: counts[moment])
            evidence = f"no {lost} of any expert, and the other moment is there"
            yield Finding(MISSING, evidence, (layer,))


def _shapes(patient: Patient) -> Iterator[Finding]:
    """Moments have the numbers of their parameters. Flat ones may have more, as padding."""
    weights: dict[str, tuple[int, ...]] = {}
    arrays = patient.source.arrays
    for name in _arrays_of(patient, WEIGHT):
        weights[plain_parameter(patient.names[name])] = arrays[name].shape
    for what in (*_MOMENTS, MASTER):
        for name in _arrays_of(patient, what):
            needs = weights.get(plain_parameter(patient.names[name]))
            has = arrays[name].shape
            if needs is None or has == needs:
                continue
            if "layers" in arrays[name].attributes and has[1:] == needs[1:]:
                continue  # whole layers are for the check of missing moments
            count, wanted = math.prod(has), math.prod(needs)
            if count < wanted or (len(has) > 1 and count != wanted):
                parts = [p for p, slot in patient.slots.items() if slot.array == name]
                layers = tuple(sorted({p.layer for p in parts if p.layer is not None}))
                evidence = (
                    f"{what} has {count:,} numbers {list(has)}, the weight {wanted:,} {list(needs)}"
                )
                numbers = {"has": count, "needs": wanted}
                yield Finding(CUT, evidence, layers[:1] if len(layers) == 1 else (), (), (name,),
                              numbers)  # fmt: skip


def _fewer_experts(patient: Patient) -> Iterator[Finding]:
    """Moments of all experts in one array, of fewer experts than have weights; where the weights
    are in arrays of another kind, no shape says so."""
    for layer in patient.moe_layers():
        for role in MATRICES:
            weights = patient.experts(layer, role)
            for what in _MOMENTS:
                slots = patient.experts(layer, role, what)
                arrays = {slot.array for slot in slots.values()}
                if len(arrays) == 1 and len(slots) > 1 and len(slots) < len(weights):
                    evidence = f"{what} of {len(slots)} experts, weights of {len(weights)}"
                    yield Finding(CUT, evidence, (layer,), (), tuple(arrays))


def _arrays_of(patient: Patient, what: str) -> set[str]:
    return {slot.array for key, slot in patient.slots.items() if key.what == what}


def _stale(patient: Patient) -> Iterator[Finding]:
    """Matrices of experts may count fewer updates: torch counts none without a gradient."""
    step, counts = patient.declared.step, patient.counts()
    if step is None or not counts or not patient.has_moments():
        return
    newest = int(max(counts.values()))
    behind = step - newest
    slack = 0 if patient.declared.exact_steps else max(_FEW_SKIPPED, step // 10)
    if newest > step or behind > slack:
        arrays = tuple(s.array for p, s in patient.slots.items() if p.what == COUNT)[:1]
        evidence = f"the weights are of step {step}, the optimizer has counted {newest} updates"
        yield Finding(STALE, evidence, (), (), arrays, {"weights": step, "moments": newest})


def of_layer(patient: Patient, layer: Layer) -> Iterator[Finding]:
    """What the numbers of one layer show."""
    yield from _cut_short(patient, layer)
    if step_of(patient) >= 2:
        yield from _rounded(patient, layer)


def _cut_short(patient: Patient, layer: Layer) -> Iterator[Finding]:
    for role in MATRICES:
        weights = layer.of(role)
        for expert, square in layer.of(role, SQUARE).items():
            slot = patient.experts(layer.number, role, SQUARE)[expert]
            row = square.shape[0] if slot.turned else square.shape[-1]
            cut = 0 < square.tail < square.size and square.zeros == square.tail
            weight = weights.get(expert)
            if cut and square.tail % row and weight is not None and weight.zeros < square.tail:
                after = [e for e, other in layer.of(role, SQUARE).items()
                         if e > expert and other.dead]  # fmt: skip
                evidence = (
                    f"exp_avg_sq of {role} is zero from number {square.size - square.tail:,} of "
                    f"{square.size:,} on, within a row of {row}"
                )
                if after:
                    evidence += f", and in experts {ranges(after)}"
                numbers = {"from": square.size - square.tail, "of": square.size}
                yield Finding(CUT, evidence, (layer.number,), (expert,), (slot.array,), numbers)


def _rounded(patient: Patient, layer: Layer) -> Iterator[Finding]:
    rounded: dict[str, list[int]] = {}
    kept = 0
    for role in MATRICES:
        masters = layer.of(role, MASTER) or layer.of(role)
        for expert, square in layer.of(role, SQUARE).items():
            master = masters.get(expert)
            if (
                master is None or master.dtype != "float32" or master.size < _LEAST
                or square.zeros == square.size or square.of_bfloat16 or master.constant
            ):  # fmt: skip
                continue
            if master.of_bfloat16:
                rounded.setdefault(role, []).append(expert)
            else:
                kept += 1
    if rounded:
        matrices = sum(map(len, rounded.values()))
        experts = tuple(sorted({e for of in rounded.values() for e in of}))
        evidence = (
            f"all numbers of {matrices} trained matrices have 16 zero bits at their end; "
            f"{kept} other matrices of the layer do not"
        )
        every = layer.experts == experts
        arrays = patient.arrays_of([layer.number], rounded)
        yield Finding(ROUNDED, evidence, (layer.number,), () if every else experts, arrays)


def all_zero(squares: dict[str, bool], patient: Patient) -> Iterator[Finding]:
    """Whether every second moment that was looked at is zero, at a step above 0."""
    step = step_of(patient)
    if squares and all(squares.values()) and step > 0:
        evidence = f"all {len(squares)} second moments are zero at step {step}"
        yield Finding(MISSING, evidence, (), (), tuple(squares)[:2], {"step": step})
