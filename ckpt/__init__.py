"""Checkpoints in zarr v3: saved, verified, and loaded on any number of ranks.

This door has what a training loop needs. The rooms have the rest: ``ckpt.store``, ``ckpt.format``,
``ckpt.lifecycle``, ``ckpt.write``, ``ckpt.read``, ``ckpt.background``, ``ckpt.rewrite``,
``ckpt.interop`` and ``ckpt.state_dict``. Arrays are known by name, shape and sharding; experts and
layers are not known.
"""

from typing import TYPE_CHECKING

from ckpt.background import SaveEvent, Tier
from ckpt.errors import CheckpointError
from ckpt.format import Manifest, committed_steps, read_manifest
from ckpt.lifecycle import Retention, find_garbage, read_lineage, remove_garbage, retain
from ckpt.read import compare, find_damage, load, verify
from ckpt.read import open_checkpoint as open  # noqa: A004
from ckpt.rewrite import reshard
from ckpt.store import LocalStore, Location, Retrying, Store, open_store
from ckpt.write import SaveInfo, save
from parallel.on_demand import on_demand

if TYPE_CHECKING:
    from ckpt.background import AsyncCheckpointer
    from ckpt.local_array import ArraySpec, LocalArray
    from ckpt.state_dict import AsyncSaver, load_state_dict, save_state_dict

__all__ = [
    "ArraySpec",
    "AsyncCheckpointer",
    "AsyncSaver",
    "CheckpointError",
    "LocalArray",
    "LocalStore",
    "Location",
    "Manifest",
    "Retention",
    "Retrying",
    "SaveEvent",
    "SaveInfo",
    "Store",
    "Tier",
    "committed_steps",
    "compare",
    "find_damage",
    "find_garbage",
    "load",
    "load_state_dict",
    "open",
    "open_store",
    "read_lineage",
    "read_manifest",
    "remove_garbage",
    "reshard",
    "retain",
    "save",
    "save_state_dict",
    "verify",
]


if not TYPE_CHECKING:  # mypy would otherwise take any name for one of this module
    # On demand: to read a checkpoint needs neither torch nor the seconds of its import.
    __getattr__ = on_demand(
        __name__,
        {
            "ArraySpec": "ckpt.local_array",
            "AsyncCheckpointer": "ckpt.background",
            "AsyncSaver": "ckpt.state_dict",
            "LocalArray": "ckpt.local_array",
            "load_state_dict": "ckpt.state_dict",
            "save_state_dict": "ckpt.state_dict",
        },
    )


def __dir__() -> list[str]:
    rooms = ["background", "format", "lifecycle", "read", "rewrite", "state_dict", "store", "write"]
    return sorted([*__all__, *rooms])
