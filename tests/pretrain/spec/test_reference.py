"""docs/spec.md says what the config models say."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from docs.spec_page import docstrings_of_fields, spec_reference
from pretrain.section import OnResume, Section
from pretrain.spec.job import JobSpec
from pretrain.spec.on_resume import on_resume, rule_of
from pretrain.spec.read import models_in, options_of

DOC = Path(__file__).parents[3] / "docs/spec.md"


def test_the_reference_is_current():
    assert DOC.read_text() == spec_reference(), "run make docs/spec.md"


def sections(model: type[BaseModel] = JobSpec, path: str = "") -> Iterator[tuple[str, type]]:
    """The class of each table by its path; of a union, every variant."""
    yield path, model
    for name, field in options_of(model).items():
        for inner in models_in(field.annotation):
            yield from sections(inner, f"{path}{name}.")


def options() -> set[str]:
    """The paths of the options: the fields that are no tables, each once for all variants."""
    return {
        f"{path}{name}"
        for path, model in sections()
        for name, field in options_of(model).items()
        if not models_in(field.annotation)
    }


def test_no_module_with_a_section_imports_torch():
    for module in {sys.modules[model.__module__] for _, model in sections()}:
        tree = ast.parse(inspect.getsource(module))
        imported = {
            alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names
        }
        imported |= {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
        assert not {name for name in imported if name.split(".")[0] == "torch"}, module


def test_there_are_no_more_options_than_these():
    """Each new one needs one to go, or a reason to raise this number."""
    # Nine are parts of published models: gpt-oss, Llama 4; GLM-4.5, OLMo 2, and four of Granite.
    # Conversations have four, tuning has four, and a run that goes on with another's training one.
    assert len(options()) <= 236


def test_every_field_says_what_it_means():
    silent = [
        f"{path}{name}"
        for path, model in sections()
        for name in model.model_fields
        if not docstrings_of_fields(model).get(name)
    ]
    assert silent == []


def test_every_field_says_whether_a_resume_may_change_it():
    for _, model in sections():
        rules = getattr(model, "on_resume", {})
        if not isinstance(rules, OnResume | str):
            assert set(rules) <= {"*", *model.model_fields}, model
        for name in model.model_fields:
            assert isinstance(on_resume(model, name), OnResume)


def test_a_section_that_does_not_say_it_is_no_part_of_the_spec():
    class Silent(Section):
        size: int = 1

    with pytest.raises(AttributeError, match="on_resume"):
        on_resume(Silent, "size")


FIXED = [
    "model", "model.num_layers", "model.yarn.factor", "moe", "moe.num_experts",
    "moe.capacity", "moe.capacity.policy", "moe.capacity.floor", "data.seq_len",
    "data.shard_tokens", "data.document_mask", "data.packing", "data.mask_boundary_labels",
    "batch.global_batch_size", "batch.batch_size_rampup", "batch.batch_size_rampup.start",
    "optimizer.kind", "train.seed",
]  # fmt: skip
FIXED_IF_EXACT = [
    "train.exact", "batch.micro_batch_size", "precision.compute",
    "moe.backend", "moe.dispatcher",
]  # fmt: skip
FREE = [
    "moe.aux_loss_coeff", "moe.capacity.replay_log", "parallel.ep", "optimizer.lr",
    "data.sources.web.weight", "data.cache_dir", "batch.stages", "train.steps", "name",
    "parallel.tp", "parallel.cp",
    "checkpoint.retention.keep", "launch.nodes", "health.loss_spike.threshold",
]  # fmt: skip


def test_what_a_resume_may_change():
    for paths, rule in (
        (FIXED, OnResume.FIXED),
        (FIXED_IF_EXACT, OnResume.FIXED_IF_EXACT),
        (FREE, OnResume.FREE),
    ):
        assert [path for path in paths if rule_of(path) is not rule] == []
    fixed = {path for path in options() if rule_of(path) is OnResume.FIXED}
    assert {path.split(".")[0] for path in fixed} == {
        "model", "moe", "data", "batch", "optimizer", "train", "tune",
    }  # fmt: skip
