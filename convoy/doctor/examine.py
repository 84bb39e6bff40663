"""The whole examination: every check, one layer at a time."""

from __future__ import annotations

from collections.abc import Callable

from convoy.doctor import copies, moments, numbers, order, reference, structure, training
from convoy.doctor.check import Check, Finding, merged
from convoy.doctor.names import COUNT, SQUARE, WEIGHT, Part
from convoy.doctor.patient import Layer, Patient

CHECKS: tuple[Check, ...] = (
    *structure.CHECKS, *numbers.CHECKS, *copies.CHECKS, *training.CHECKS, *order.CHECKS,
    *moments.CHECKS,
    *reference.CHECKS,
)  # fmt: skip
"""Every corruption that is looked for."""
Progress = Callable[[int], None]


def examine(
    patient: Patient, other: Patient | None = None, progress: Progress = lambda _: None
) -> list[Finding]:
    """Every finding of a checkpoint, in the order of :data:`CHECKS`; none of a healthy one.

    Args:
        patient: the checkpoint.
        other: an older or the original checkpoint, of any format, with the same layers.
        progress: called with the bytes of each layer when it has been examined.

    Raises CheckpointError where numbers are missing or damaged. Nothing is written.
    """
    findings = [*structure.find(patient), *training.of_shapes(patient), *moments.find(patient)]
    if other is not None:
        findings += reference.of_names(patient, other)
    findings += numbers.outside(patient)
    gathered = (
        training.Untrained(), training.Turned(SQUARE), training.Turned(WEIGHT), order.Orders(),
        copies.Copies(), copies.LayerCopies(),
    )  # fmt: skip
    squares: dict[str, bool] = {}
    for number in patient.moe_layers():
        layer = patient.examined(number)
        findings += numbers.of_layer(patient, layer)
        findings += moments.of_layer(patient, layer)
        for over_layers in gathered:
            over_layers.add(layer)
        squares |= _dead_squares(patient, layer)
        if other is not None and number in other.moe_layers():
            before = other.examined(number)
            related = reference.is_related(layer, before)
            findings += reference.of_layer(patient, layer, before, related)
        progress(_bytes_of(patient, number))
    for over_layers in gathered:
        findings += over_layers.find(patient)
    findings += moments.all_zero(squares, patient)
    rank = {check.name: i for i, check in enumerate(CHECKS)}
    return sorted(merged(_told_once(findings)), key=lambda f: (rank[f.check.name], f.layers))


def total_bytes(patient: Patient) -> int:
    """The bytes of the layers with experts, for a progress bar."""
    return sum(_bytes_of(patient, number) for number in patient.moe_layers())


def _bytes_of(patient: Patient, layer: int) -> int:
    shares = [_share(patient, slot_of) for slot_of in patient.slots if slot_of.layer == layer]
    return sum(shares)


def _share(patient: Patient, of: Part) -> int:
    slot = patient.slots[of]
    size = 1
    for length in slot.shape:
        size *= length
    size *= patient.source.arrays[slot.array].dtype.itemsize
    return size // 2 if slot.half is not None else size if of.what != COUNT else 0


def _dead_squares(patient: Patient, layer: Layer) -> dict[str, bool]:
    """By array, whether all second moments of a layer are zero."""
    dead: dict[str, bool] = {}
    for (what, role), of in layer.matrices.items():
        if what == SQUARE:
            for expert, vitals in of.items():
                name = patient.experts(layer.number, role, what)[expert].array
                dead[name] = dead.get(name, True) and vitals.dead
    for (what, role), vitals in layer.singles.items():
        if what == SQUARE:
            for name in patient.arrays_of([layer.number], [role], what):
                dead[name] = dead.get(name, True) and vitals.dead
    return dead


def _told_once(findings: list[Finding]) -> list[Finding]:
    """A cause hides what follows from it: experts of zeros or NaN are not also at random values,
    and copies have another's place."""
    copied = {
        (layer, expert)
        for f in findings if f.check in (copies.BLOCKS, copies.TWICE)
        for layer in f.layers for expert in f.experts
    }  # fmt: skip
    shown = []
    for finding in findings:
        places = {(layer, expert) for layer in finding.layers for expert in finding.experts}
        follows = finding.check in (training.INITIAL, reference.REPLACED, order.ORDER)
        if not (follows and places and places <= copied):
            shown.append(finding)
    return shown
