"""The spec that a checkpoint holds, without fields that this version does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_origin

from pydantic import BaseModel

from pretrain.spec.job import JobSpec
from pretrain.spec.read import models_in, options_of, tag_of


def stored_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A spec that a checkpoint holds, as this version reads it; the argument is unchanged.

    Options that were dropped since the save are left out. Nothing is checked, and nothing is
    filled in.

    Args:
        spec: sections as plain JSON; sections may be missing.
    """
    kept = _known(JobSpec, spec)
    if "auto" in (spec.get("plan") or {}):
        # The layout of such a spec is the one that was taken, and a cluster alone planned nothing.
        del kept["plan"]
    return kept


CONSTANTS: dict[str, Any] = {
    "moe.router_dtype": "float32",
    "moe.capacity.rank_capacity_factor": 1.0,
    "optimizer.update_rms": 0.2,
    "optimizer.newton_schulz_steps": 5,
    "optimizer.newton_schulz_dtype": None,
}
"""Dropped options on which every number of a run depends, with what holds now."""


def other_constants(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The dropped options of :data:`CONSTANTS` that a stored spec has at another value."""
    others = {}
    for path, constant in CONSTANTS.items():
        value: Any = spec
        for name in path.split("."):
            value = value.get(name, constant) if isinstance(value, Mapping) else constant
        if value != constant:
            others[path] = value
    return others


def _known(model: type[BaseModel], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of fields that a model has, and so on in its tables."""
    kept: dict[str, Any] = {}
    options = options_of(model)
    for name, value in values.items():
        field = options.get(name)
        if field is None:
            continue
        variants, tag = models_in(field.annotation), tag_of(field)
        if len(variants) > 1 and isinstance(value, Mapping):
            kind = value.get(tag)
            variants = [v for v in variants if v.model_fields[tag].default == kind]
        if len(variants) != 1:
            kept[name] = value
            continue
        (table,) = variants
        # A union of a table and None, a list of tables, or tables by name.
        origin = get_origin(field.annotation)
        if origin is dict and isinstance(value, Mapping):
            kept[name] = {key: _table(table, inner) for key, inner in value.items()}
        elif isinstance(value, list):
            kept[name] = [_table(table, inner) for inner in value]
        else:
            kept[name] = _table(table, value)
    return kept


def _table(model: type[BaseModel], value: Any) -> Any:
    return _known(model, value) if isinstance(value, Mapping) else value
