"""Open kinds: values of a config that name a class, of this repository or of anybody.

A class of this repository has a short name and one line in a table of a ``config.py``. Any other
class is named ``package.module:Class``. Rules between options ask a kind's traits and never its
name. Neither this file nor a table imports torch: the classes of a table are imported where they
are used.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel


@dataclass(frozen=True)
class Traits:
    """What rules between options may ask of a kind."""

    path: str = ""
    """``package.module:Class``, in a table; empty in the traits of a class from outside."""


def fields_of_others(
    table: Mapping[str, Any], name: Any, variants: Mapping[str, type[BaseModel]]
) -> Iterator[tuple[str, list[str]]]:
    """The fields of a table that its variant ``name`` lacks and others have, each with the names of
    these others; none for a variant that is not among ``variants``."""
    known = isinstance(name, str) and name in variants
    for field in table if known else ():
        others = [other for other, config in variants.items() if field in config.model_fields]
        if others and name not in others:
            yield field, others


AnyTraits = TypeVar("AnyTraits", bound=Traits)


class OpenKind(Generic[AnyTraits]):
    """The kinds of one field of a config; a field with this in its annotation is checked by it.

    Args:
        field: the field's path in a job spec, for errors.
        base: the public class that a class from outside derives from, for errors.
        table: the traits of the kinds of this repository, by name.
    """

    def __init__(self, field: str, base: str, table: Mapping[str, AnyTraits]) -> None:
        self.field, self.base, self.table = field, base, table

    @property
    def names(self) -> tuple[str, ...]:
        """What a value of the field may be."""
        return (*self.table, "package.module:Class")

    def check(self, name: str) -> str:
        """The name itself; for pydantic's AfterValidator.

        Raises ValueError, one line, for a name that is in no table and for a path without a class
        of this kind.
        """
        self.traits(name)
        return name

    def traits(self, name: str) -> AnyTraits:
        """The traits of a kind; a class from outside is imported. Raises as :meth:`check`."""
        if name in self.table:
            return self.table[name]
        if ":" not in name:
            *names, last = self.names
            raise ValueError(f"{self.field} ({name}) must be {', '.join(names)} or {last}")
        declared: AnyTraits = self._imported(name, name).traits
        return declared

    def load(self, name: str) -> Any:
        """The class of a kind. Raises as :meth:`check`."""
        return self._imported(name, self.table[name].path if name in self.table else name)

    def _imported(self, name: str, path: str) -> Any:
        try:
            kind = pkgutil.resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{self.field} ({name}) must be importable as package.module:Class: {error}"
            ) from None
        wanted = type(next(iter(self.table.values())))
        if not (isinstance(kind, type) and isinstance(getattr(kind, "traits", None), wanted)):
            raise ValueError(
                f"{self.field} ({name}) must name a class with traits, as those derived from "
                f"{self.base}"
            )
        return kind
