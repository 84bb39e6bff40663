"""Zarr checkpoints: layout, commit, tiers, reshard. It knows tensors, not experts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt.api import *  # noqa: F403

_WITHOUT_TORCH = {
    "open": ("ckpt.opened", "open_checkpoint"),
    "CheckpointError": ("ckpt.format", "CheckpointError"),
}


def __getattr__(name: str) -> Any:
    # On demand: to read a checkpoint needs neither torch nor its seconds of import.
    if name.startswith("__") and name != "__all__":
        raise AttributeError(name)
    module, attribute = _WITHOUT_TORCH.get(name, ("ckpt.api", name))
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value
