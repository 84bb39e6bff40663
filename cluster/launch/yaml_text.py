"""Plain objects as YAML; every string that is not a plain word is written as JSON, which YAML
reads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_NO_STRINGS = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}


def as_yaml(value: Mapping[str, Any], indent: str = "") -> str:
    """A document. Texts of several lines are block scalars."""
    return "".join(_entry(f"{indent}{_scalar(key)}:", each, indent) for key, each in value.items())


def _entry(head: str, value: Any, indent: str) -> str:
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        return f"{head}\n{as_yaml(value, inner)}"
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return f"{head}\n" + "".join(_item(each, indent) for each in value)
    if isinstance(value, str) and "\n" in value and not value.startswith((" ", "\n")):
        # "|" keeps the one newline at the end, "|-" has none there.
        body = value.removesuffix("\n")
        lines = [f"{inner}{line}" if line else "" for line in body.split("\n")]
        if not body.endswith("\n"):
            return f"{head} {'|' if value.endswith(chr(10)) else '|-'}\n" + "\n".join(lines) + "\n"
    return f"{head} {_scalar(value)}\n"


def _item(value: Any, indent: str) -> str:
    if isinstance(value, Mapping) and value:
        text = as_yaml(value, indent + "  ")
        return f"{indent}- {text[len(indent) + 2 :]}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"{indent}- {json.dumps(value)}\n"
    return _entry(f"{indent}-", value, indent)


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NO_STRINGS:
        return value
    return json.dumps(value)
