"""What may change at a resume, as the fields of the spec say it themselves."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from pydantic import BaseModel

from pretrain.section import OnResume
from pretrain.spec.job import JobSpec
from pretrain.spec.read import models_in, options_of


def on_resume(model: type[BaseModel], name: str) -> OnResume:
    """Whether a resume may change a field: what the field says, or else its class.

    Raises AttributeError where neither says it.
    """
    for rule in model.model_fields[name].metadata:
        if isinstance(rule, OnResume):
            return rule
    rules: str | Mapping[str, str] = model.on_resume  # type: ignore[attr-defined]
    return OnResume(rules if isinstance(rules, str) else rules.get(name) or rules["*"])


def rule_of(path: str) -> OnResume:
    """Whether a resume may change the value at a dotted path of a spec.

    The name of a source, which is no field, has the rule of ``data.sources``.
    """
    rules = _rules()
    while path and path not in rules:
        path = path.rpartition(".")[0]
    return rules.get(path, OnResume.FIXED)


@cache
def _rules() -> dict[str, OnResume]:
    """The rule of every field by its path."""
    rules: dict[str, OnResume] = {}

    def add(model: type[BaseModel], prefix: str) -> None:
        for name, field in options_of(model).items():
            rules[f"{prefix}{name}"] = on_resume(model, name)
            for inner in models_in(field.annotation):
                add(inner, f"{prefix}{name}.")

    add(JobSpec, "")
    return rules
