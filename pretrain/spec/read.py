"""Reading a job spec: a file, overrides, and one line for what is wrong with them."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from pretrain.errors import InputError
from pretrain.spec.job import JobSpec


def load_spec(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """Read a spec and apply ``section.field=value`` overrides.

    A value is read as TOML, or taken as a string where it is none: ``train.steps=10``,
    ``data.source=stdlib``.

    Raises InputError: one line that names the field, the value and the rule.
    """
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"spec {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"spec {path} is not valid {path.suffix or 'TOML'}: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"spec {path} must be a table of sections")
    return resolve_spec(data, f"spec {path}", overrides)


def resolve_spec(data: dict[str, Any], where: str, overrides: Sequence[str] = ()) -> JobSpec:
    """The spec of a table of sections. Raises InputError, which begins with ``where``."""
    for override in overrides:
        _apply_override(data, override)
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise InputError(f"{where}: {_one_line(error)}") from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not all(key.split(".")):
        raise InputError(f"--set ({override}) must be SECTION.FIELD=VALUE")
    *sections, field = key.split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise InputError(f"--set ({override}): {section} is not a section")
    try:
        data[field] = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        data[field] = value


def _one_line(error: ValidationError) -> str:
    # A field that there is not explains the one that is missing for it.
    errors = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    location = ".".join(str(part) for part in first["loc"])
    if first["type"] == "value_error":
        return str(first["ctx"]["error"]) + more
    if first["type"] == "extra_forbidden":
        known = _fields_at(first["loc"][:-1])
        close = difflib.get_close_matches(str(first["loc"][-1]), known, 1)
        hint = f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"
        return f"{location}: no such field{hint}{more}"
    if first["type"] == "missing":
        return f"{location}: required{more}"
    return f"{location} ({first['input']!r}): {first['msg']}{more}"


def _fields_at(location: Sequence[int | str]) -> list[str]:
    model: type[BaseModel] = JobSpec
    for part in location:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
