"""The names that ``ckpt`` has; imported when the first of them is asked for."""

from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Manifest,
    OtherRankError,
    committed_steps,
    manifest_name,
    manifest_path,
    objects_dir,
    read_manifest,
)
from ckpt.loading import load, open_group, read_box, read_box_into, verify
from ckpt.locations import Location, open_store
from ckpt.messages import TIERS, Event, Tier, TierName
from ckpt.opened import OpenCheckpoint, StoredArray
from ckpt.opened import open_checkpoint as open  # noqa: A004
from ckpt.peer import address_towards
from ckpt.resharding import reshard
from ckpt.retention import remove_uncommitted, retain
from ckpt.saver import Saver
from ckpt.saving import Agree, SaveInfo, save
from ckpt.store import LocalStore, Store
from ckpt.stream import save_streamed
from ckpt.tensors import ArraySpec, LocalArray
from ckpt.tiers import fingerprint, forget_after, reachable

__all__ = [
    "TIERS",
    "Agree",
    "ArrayRecord",
    "ArraySpec",
    "CheckpointError",
    "Event",
    "LocalArray",
    "LocalStore",
    "Location",
    "Manifest",
    "OpenCheckpoint",
    "OtherRankError",
    "SaveInfo",
    "Saver",
    "Store",
    "StoredArray",
    "Tier",
    "TierName",
    "address_towards",
    "committed_steps",
    "fingerprint",
    "forget_after",
    "load",
    "manifest_name",
    "manifest_path",
    "objects_dir",
    "open",
    "open_group",
    "open_store",
    "reachable",
    "read_box",
    "read_box_into",
    "read_manifest",
    "remove_uncommitted",
    "reshard",
    "retain",
    "save",
    "save_streamed",
    "verify",
]
