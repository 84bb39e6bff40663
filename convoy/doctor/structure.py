"""Checks of what a checkpoint has by name and shape: experts, routers, layers, biases, dtypes."""

from __future__ import annotations

from collections.abc import Iterator

from convoy.doctor.check import Check, Finding, ranges
from convoy.doctor.names import BIAS, MATRICES, MEAN, ROUTER, SQUARE, WEIGHT
from convoy.doctor.patient import Patient

PARTIAL = Check(
    "partial-experts",
    "one rank's share of the experts was saved",
    "experts, and a router or a config that says how many there should be",
    ("KempnerForge#202", "verl#2086", "Megatron-Bridge#1716"),
    "the other experts are in no file: save again with all expert-parallel ranks",
)
COUNTS = Check(
    "counts-disagree",
    "routers, experts and config disagree on how many experts there are",
    "two of experts, router and config",
    (),
    "find the step that dropped or added experts, and convert again from before it",
)
LAYERS = Check(
    "missing-layers",
    "parts of some layers are not there",
    "names of layers",
    ("ISEEKYAN/Megatron-LM#19", "Megatron-Bridge#4329"),
    "save again with all pipeline stages, or convert again from a whole checkpoint",
)
BIASES = Check(
    "missing-bias",
    "routers lack the bias that chooses experts",
    "biases in other layers, or a config that has them",
    ("DeepSpeed#8358", "Megatron-Bridge#4657"),
    "a trainer would begin with zeros and route otherwise: take those of the original",
)
DTYPES = Check(
    "mixed-dtypes",
    "experts of one layer have different dtypes",
    "dtypes of arrays",
    (),
    "convert all of them again from the wider dtype",
)
CHECKS = (PARTIAL, COUNTS, LAYERS, BIASES, DTYPES)
_FLOATS = {"float64", "float32", "float16", "bfloat16"}


def find(patient: Patient) -> Iterator[Finding]:
    """What names and shapes alone show."""
    layers = patient.moe_layers()
    yield from _layers(patient, layers)
    for layer in layers:
        yield from _counts(patient, layer)
        yield from _dtypes(patient, layer)
    yield from _biases(patient, layers)


def _counts(patient: Patient, layer: int) -> Iterator[Finding]:
    by_role = {role: patient.experts(layer, role) for role in MATRICES}
    present = {role: set(of) for role, of in by_role.items() if of}
    every = set().union(*present.values()) if present else set()
    arrays = patient.arrays_of([layer], MATRICES)
    if not every:
        return  # the layers say so
    for role, has in present.items():
        lacking = sorted(every - has)
        if lacking:
            evidence = f"no {role} matrix of {len(lacking)} of {len(every)} experts"
            yield Finding(LAYERS, evidence, (layer,), tuple(lacking), arrays)
    router = patient.slot(layer, ROUTER)
    rows = router.shape[0] if router is not None and len(router.shape) == 2 else None
    bias = patient.slot(layer, BIAS)
    lengths = {
        "router rows": rows,
        "biases": bias.shape[0] if bias is not None and bias.shape else None,
        "experts in the config": patient.declared.experts,
    }
    counts = {what: count for what, count in lengths.items() if count is not None}
    numbers = {"experts": len(every), **counts}
    wrong = {what: count for what, count in counts.items() if count != len(every)}
    if sorted(every) != list(range(len(every))):
        evidence = f"experts have the numbers {ranges(every)}"
        yield Finding(COUNTS, evidence, (layer,), (), arrays, numbers)
    elif wrong:
        said = ", ".join(f"{count} {what}" for what, count in wrong.items())
        times = {count / len(every) for count in wrong.values()}
        ratio = times.pop()
        if not times and ratio > 1 and ratio == int(ratio) and len(wrong) == len(counts):
            evidence = f"{len(every)} experts of {said}: 1/{int(ratio)} of them"
            yield Finding(PARTIAL, evidence, (layer,), (), arrays, numbers)
        else:
            evidence = f"{len(every)} experts, {said}"
            yield Finding(COUNTS, evidence, (layer,), (), arrays, numbers)


def _layers(patient: Patient, moe_layers: tuple[int, ...]) -> Iterator[Finding]:
    there = set(patient.layers())
    if not there:
        return
    wanted = patient.declared.layers or max(there) + 1
    missing = sorted(set(range(wanted)) - there)
    if missing:
        evidence = f"{len(there)} of {wanted} layers, without {ranges(missing)}"
        yield Finding(LAYERS, evidence, tuple(missing))
    declared = patient.declared.moe_layers
    without = sorted(set(declared or ()) & there - set(moe_layers))
    if without:
        yield Finding(LAYERS, "no experts and no router, which the config has", tuple(without))
    for role in (*MATRICES, ROUTER):
        have = [
            layer
            for layer in moe_layers
            if (patient.slot(layer, role) if role == ROUTER else patient.experts(layer, role))
        ]
        lacking = sorted(set(moe_layers) - set(have))
        if have and lacking:
            what = "router" if role == ROUTER else f"{role} matrix"
            evidence = f"no {what}, which {len(have)} other layers have"
            yield Finding(LAYERS, evidence, tuple(lacking))


def _biases(patient: Patient, layers: tuple[int, ...]) -> Iterator[Finding]:
    having = [layer for layer in layers if patient.slot(layer, BIAS) is not None]
    lacking = tuple(layer for layer in layers if layer not in having)
    if lacking and (having or patient.declared.biased):
        evidence = f"{len(having)} of {len(layers)} routers have one"
        if patient.declared.biased:
            evidence += ", and the config has it"
        yield Finding(BIASES, evidence, lacking)


def _dtypes(patient: Patient, layer: int) -> Iterator[Finding]:
    for what in (WEIGHT, MEAN, SQUARE):
        for role in MATRICES:
            dtypes: dict[str, list[int]] = {}
            for expert, slot in patient.experts(layer, role, what).items():
                dtype = patient.source.arrays[slot.array].logical_dtype
                dtypes.setdefault(dtype, []).append(expert)
            if len(dtypes) > 1 and set(dtypes) <= _FLOATS:
                said = ", ".join(f"{ranges(of)} {dtype}" for dtype, of in sorted(dtypes.items()))
                few = min(dtypes.values(), key=len)
                evidence = f"{what} of {role}: experts {said}"
                arrays = tuple(patient.experts(layer, role, what)[e].array for e in few)
                yield Finding(DTYPES, evidence, (layer,), tuple(few), arrays)
