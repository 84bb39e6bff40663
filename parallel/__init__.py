"""Device meshes, shard layouts, collectives, and functions that parallelize a model.

``dir(parallel)`` lists the public names. ``parallel.layout`` can be imported without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # Imported on demand: parallel.layout needs neither torch nor the seconds of torch's import.
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("parallel.api"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    names: list[str] = import_module("parallel.api").__all__
    return names
