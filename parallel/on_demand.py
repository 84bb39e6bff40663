"""Names of a package that are imported at their first use.

A package whose other names need no torch can be imported without the seconds of torch's import.
This module imports nothing, so that every package can use it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_demand(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package (PEP 562) that imports the names in ``homes``.

    Args:
        package: the ``__name__`` of the package.
        homes: the module of each name.
    """

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return find
