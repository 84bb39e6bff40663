"""Zarr checkpoints: layout, commit, tiers, reshard. It knows tensors, not experts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    # On demand: to read a checkpoint needs neither torch nor its seconds of import.
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    value = getattr(import_module("ckpt.api"), name)
    globals()[name] = value
    return value
