"""docs/spec.md says what the config models say."""

from __future__ import annotations

from pathlib import Path

from docs.spec_page import docstrings_of_fields, spec_reference
from pretrain.spec.job import JobSpec
from pretrain.spec.read import models_in

DOC = Path(__file__).parents[3] / "docs/spec.md"


def test_the_reference_is_current():
    assert DOC.read_text() == spec_reference(), "run make docs/spec.md"


def test_every_field_says_what_it_means():
    def silent(model, path):
        for name, field in model.model_fields.items():
            if not docstrings_of_fields(model).get(name):
                yield f"{path}{name}"
            for inner in models_in(field.annotation):
                yield from silent(inner, f"{path}{name}.")

    assert list(silent(JobSpec, "")) == []
