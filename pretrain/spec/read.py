"""Reading a job spec: a file, overrides, and one line for an error in either."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, Discriminator, ValidationError
from pydantic.fields import FieldInfo

from moe import MoEConfig
from pretrain.errors import InputError
from pretrain.spec.job import JobSpec
from pretrain.spec.shrink import shrink
from pretrain.spec.table import apply_override, read_table

# What pydantic adds to the location of a field that takes one of several types.
_TYPE = re.compile(r"literal\[.*\]|int|float|str|bool|constrained-.*|list\[.*\]|dict\[.*\]")


def load_spec(path: Path, overrides: Sequence[str] = (), *, shrunk: bool = False) -> JobSpec:
    """Read a spec and apply ``section.field=value`` overrides.

    A value is read as TOML, and what is not TOML is a string: ``train.steps=10``,
    ``data.source=stdlib``.

    Args:
        path: the file.
        overrides: applied last.
        shrunk: make the sizes small, see :func:`pretrain.spec.shrink`.

    Raises InputError: one line that names the field, the value and the rule.
    """
    data = read_table(path, "spec")
    return resolve_spec(shrink(data) if shrunk else data, f"spec {path}", overrides)


def resolve_spec(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> JobSpec:
    """The spec of a table of sections. Raises InputError, which begins with ``where``."""
    for override in overrides:
        apply_override(data, override)
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{where}: {one_line(error)}") from None


def one_line(error: ValidationError, root: type[BaseModel] = JobSpec) -> str:
    """What is wrong with a table of the model ``root``: the field, the value and the rule."""
    # An unknown field explains why another one is missing.
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    if first["type"] == "value_error":
        return _in_terms_of_a_spec(str(first["ctx"]["error"])) + more
    parts, model = _walk(first["loc"], root)
    location = ".".join(parts)
    if first["type"] == "extra_forbidden":
        return f"{location}: no such field{_suggestion(parts, model, root)}{more}"
    if first["type"] == "missing":
        return f"{location}: required{more}"
    if first["type"] == "union_tag_invalid":
        known, tag = first["ctx"]["expected_tags"], first["ctx"]["tag"]
        field = first["ctx"]["discriminator"].strip("'")
        return f"{location}.{field} ({tag!r}): Input should be {known}{more}"
    # A field of several types has an error for each.
    rules = [each["msg"] for each in errors if _walk(each["loc"], root)[0] == parts]
    more = f" (and {len(errors) - len(rules)} more)" if len(errors) > len(rules) else ""
    rule = " or ".join([rules[0], *(each.removeprefix("Input should be ") for each in rules[1:])])
    return f"{location} ({first['input']!r}): {rule}{more}"


def _in_terms_of_a_spec(text: str) -> str:
    """A rule of the layer, which names the layer's fields, with the fields that a spec has."""
    for field, origin in MoEConfig.OF_OTHER_SECTIONS.items():
        text = text.replace(f"moe.{field} (", f"{origin} (")
    return text


def _suggestion(parts: Sequence[str], model: type[BaseModel], root: type[BaseModel]) -> str:
    """A field of the section with a similar name, and where a field of this name is; otherwise
    which fields the section has."""
    field, known = parts[-1], list(options_of(model))
    elsewhere = [path for path in _paths(root) if path.rpartition(".")[2] == field]
    close = [".".join([*parts[:-1], name]) for name in difflib.get_close_matches(field, known, 1)]
    if elsewhere or close:
        return f"; did you mean {' or '.join(close + elsewhere)}?"
    return f"; there are {', '.join(known)}"


def _walk(
    location: Sequence[int | str], model: type[BaseModel]
) -> tuple[list[str], type[BaseModel]]:
    """The parts of a location without the tags of unions, and the model that has the last part."""
    parts: list[str] = []
    variants: list[type[BaseModel]] = []
    tag, is_value = "", False
    for part in map(str, location):
        chosen = [v for v in variants if v.model_fields[tag].default == part]
        if chosen:
            model, variants = chosen[0], []
            continue
        if variants:
            model = variants[0]
        if (is_value and _TYPE.fullmatch(part)) or part == "[key]":
            continue
        parts.append(part)
        field = model.model_fields.get(part)
        models = [] if field is None else models_in(field.annotation)
        variants = models if len(models) > 1 else []
        is_value = field is not None and not models
        tag = "" if field is None else tag_of(field)
        if part is not location[-1] and len(models) == 1:
            model = models[0]
    return parts, model


def options_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a model that a spec may have, by name: all but those of other sections."""
    elsewhere = getattr(model, "OF_OTHER_SECTIONS", {})
    return {name: field for name, field in model.model_fields.items() if name not in elsewhere}


def tag_of(field: FieldInfo) -> str:
    """The name of the field that tells the variants of a union apart; empty for no union."""
    if isinstance(field.discriminator, Discriminator):  # a function of the field's name
        return str(getattr(field.discriminator.discriminator, "__name__", ""))
    return field.discriminator or ""


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The config models of a field's type: one for a section, several for a union of variants."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in models_in(inner)]


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every field of a model by its dotted path, once for all variants of a union."""
    for name, field in options_of(model).items():
        yield f"{prefix}{name}"
        inner = (
            path for m in models_in(field.annotation) for path in _paths(m, f"{prefix}{name}.")
        )
        yield from dict.fromkeys(inner)
