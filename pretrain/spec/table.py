"""Reading a table of settings: a TOML or JSON file, and overrides of the command line."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from pretrain.errors import InputError


def read_table(path: Path, what: str) -> dict[str, Any]:
    """The sections of a TOML or JSON file.

    Args:
        path: the file.
        what: what the file is, ``spec``: the first word of an error.

    Raises InputError: one line that names the file and the rule.
    """
    if path.suffix not in (".toml", ".json", ""):
        raise InputError(
            f"{what} {path}: a {what} is TOML or JSON, in a file named *.toml or *.json"
        )
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{what} {path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        kind = path.suffix or "TOML"
        raise InputError(f"{what} {path} is not valid {kind}: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{what} {path} must be a table of sections")
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    """Change one field of ``data`` in place, as ``section.field=value`` says.

    A value is read as TOML, and what is not TOML is a string: ``train.steps=10``,
    ``data.source=stdlib``.

    Raises InputError: one line that names the override and the rule.
    """
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
