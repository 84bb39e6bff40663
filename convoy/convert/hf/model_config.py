"""The values of a Hugging Face ``config.json``, and errors in its words."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pretrain.errors import InputError

_FIELD = re.compile(r"\b(?:model|moe)\.\w+")
_EVERYWHERE = {"model.vocab_size": ("vocab_size",)}
"""What all families call the same."""


class HFConfig:
    """The values of one ``config.json``.

    A null is not what is left out: ``given`` has the names of both, ``values`` what is not null.
    Raises InputError, naming the file, for what is missing or not of its type.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.where, self.given = where, set(values)
        self.values = {key: value for key, value in values.items() if value is not None}

    @staticmethod
    def read(folder: Path) -> HFConfig:
        """The ``config.json`` of a folder."""
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise InputError(f"{path} must be a table of values")
        return HFConfig(values, str(path))

    def theirs(self, text: str, names: Mapping[str, Sequence[str]] = _EVERYWHERE) -> str:
        """An error about a spec, in the words of the config: ``moe.top_k`` is
        ``num_experts_per_tok``. ``names`` has, by a field of a spec, what a config may call it."""

        def name(match: re.Match[str]) -> str:
            given = [name for name in names.get(match[0], ()) if name in self.values]
            return given[0] if given else match[0]

        return _FIELD.sub(name, text)

    def is_null(self, name: str) -> bool:
        """Whether a value is there, and null."""
        return name in self.given and name not in self.values

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        value = self.values.get(name, default)
        if value is None:
            raise InputError(f"{self.where}: {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(name, "be a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self.values.get(name, default)
        if value is None:
            raise InputError(f"{self.where}: {name} is missing")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "be true or false")
        return value

    def must(self, name: str, *allowed: Any) -> None:
        """Refuse other values than these, of which the first is the default."""
        if self.values.get(name, allowed[0]) not in allowed:
            raise self.wrong(name, f"be {' or '.join(json.dumps(a) for a in allowed)}")

    def wrong(self, name: str, rule: str) -> InputError:
        """The error of a value that cannot be used."""
        value = json.dumps(self.values.get(name))
        return InputError(f"{self.where}: {name} ({value}) must {rule}")
