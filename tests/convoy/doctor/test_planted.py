"""Each known corruption is planted in a trained model, and named, in every format that has it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.doctor import CHECKS, examine, open_patient
from tests.support.patients.planted import KINDS, PATIENTS, SQUARE, Kind
from tests.support.patients.trained import Trained, train
from tests.support.patients.written import FORMATS, WITH_MOMENTS, write

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
# A model of 40 steps has too little in its weights for these: the full table asks for them.
NEED_TRAINING = (
    "ranks that were never loaded", "no expert was loaded", "gate transposed",
    "gate_up of D = 2F transposed",
)  # fmt: skip
SHORT = list({
    kind.check: name for name, kind in KINDS.items() if not name.startswith(NEED_TRAINING)
}.values())  # fmt: skip
"""One kind of each check."""


@pytest.fixture(scope="module")
def small() -> Trained:
    case = replace(SQUARE, model={"num_layers": 3}, moe={**SQUARE.moe, "d_ff": 32}, steps=40)
    return train(case)[40]


@pytest.fixture(scope="module")
def patients() -> dict[str, dict[int, Trained]]:
    return {name: train(case, (150,)) for name, case in PATIENTS.items()}


@pytest.mark.parametrize("name", SHORT)
def test_a_corruption_is_named_in_one_format(name, small, tmp_path):
    kind = KINDS[name]
    form = kind.formats[SHORT.index(name) % len(kind.formats)]
    assert_named(kind, form, small, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_corruption_is_named_in_every_format(name, patients, tmp_path):
    kind = KINDS[name]
    for form in kind.formats:
        assert_named(kind, form, patients[kind.patient][200], tmp_path / form)


@pytest.mark.slow
@pytest.mark.parametrize("form", WITH_MOMENTS)
def test_moments_of_an_older_checkpoint_are_named_with_that_checkpoint(form, patients, tmp_path):
    old, new = patients["square"][150], patients["square"][200]
    moments = {n: v for n, v in old.arrays.items() if n.startswith("optimizer/")}
    mixed = replace(new, arrays={**new.arrays, **moments})
    before = open_patient(str(write("convoy", old, tmp_path / "old")))
    patient = open_patient(str(write(form, mixed, tmp_path / "iter_0000200")))
    assert [f.check.name for f in examine(patient, before)] == ["stale-moments"]
    fine = open_patient(str(write(form, new, tmp_path / "fine" / "iter_0000200")))
    assert examine(fine, before) == []


def test_every_check_is_planted_and_every_format_has_a_dozen_kinds():
    planted = {kind.check for kind in KINDS.values()}
    assert {check.name for check in CHECKS} == planted
    for form in FORMATS:
        checks = {kind.check for kind in KINDS.values() if form in kind.formats}
        assert len(checks) >= 12, (form, sorted(checks))


def assert_named(kind: Kind, form: str, trained: Trained, folder) -> None:
    """By one finding, which names the right layers and experts."""
    planted = kind.plant(trained)
    path = write(form, planted, folder / f"iter_{trained.step:07d}")
    other = None
    if kind.against:
        other = open_patient(str(write("convoy", trained, folder / "before")))
    findings = examine(open_patient(str(path)), other)
    assert [f.check.name for f in findings] == [kind.check], [f.line() for f in findings]
    (finding,) = findings
    if kind.layers is not None:
        assert finding.layers == kind.layers, finding.line()
    if kind.experts is not None:
        assert finding.experts == kind.experts, finding.line()
    assert finding.evidence in finding.line()
    assert "\n" not in finding.line()
