"""Zarr checkpoints: layout, commit, tiers, reshard. It knows tensors, not experts."""

from typing import TYPE_CHECKING, Any

from ckpt.background import TIERS, Event, Tier, TierName
from ckpt.errors import CheckpointError, OtherRankError
from ckpt.format import (
    ArrayRecord,
    Manifest,
    committed_steps,
    manifest_key,
    manifest_name,
    manifest_path,
    objects_dir,
    read_manifest,
)
from ckpt.lifecycle import (
    Garbage,
    Link,
    Removal,
    Retention,
    RetentionPlan,
    find_garbage,
    fingerprint,
    forget,
    plan_retention,
    reachable,
    read_lineage,
    remove_garbage,
    remove_uncommitted,
    retain,
    spec_differences,
)
from ckpt.read import (
    ArrayDifference,
    OpenCheckpoint,
    StoredArray,
    compare,
    find_damage,
    load,
    open_group,
    read_box,
    read_box_into,
    verify,
)
from ckpt.read import open_checkpoint as open  # noqa: A004
from ckpt.rewrite import reshard
from ckpt.store import (
    LocalStore,
    Location,
    Retrying,
    Store,
    address_towards,
    as_location,
    open_store,
)
from ckpt.write import Agree, SaveInfo, save, save_streamed

if TYPE_CHECKING:
    from ckpt.background import Saver
    from ckpt.local_array import ArraySpec, LocalArray

_WITH_TORCH = {
    "ArraySpec": "ckpt.local_array",
    "LocalArray": "ckpt.local_array",
    "Saver": "ckpt.background.saver",
}


def __getattr__(name: str) -> Any:
    # On demand: to read a checkpoint needs neither torch nor the seconds of its import.
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_WITH_TORCH[name]), name)
    globals()[name] = value
    return value


__all__ = [
    "TIERS", "Agree", "ArrayDifference", "ArrayRecord", "ArraySpec", "CheckpointError", "Event",
    "Garbage", "Link", "LocalArray", "LocalStore", "Location", "Manifest", "OpenCheckpoint",
    "OtherRankError", "Removal", "Retention", "RetentionPlan", "Retrying", "SaveInfo", "Saver",
    "Store", "StoredArray", "Tier", "TierName", "address_towards", "as_location",
    "committed_steps", "compare", "find_damage", "find_garbage", "fingerprint", "forget", "load",
    "manifest_key", "manifest_name", "manifest_path", "objects_dir", "open", "open_group",
    "open_store", "plan_retention", "reachable", "read_box", "read_box_into", "read_lineage",
    "read_manifest", "remove_garbage", "remove_uncommitted", "reshard", "retain", "save",
    "save_streamed", "spec_differences", "verify",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__
