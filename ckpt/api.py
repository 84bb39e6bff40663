"""The names that ``ckpt`` has; imported when the first of them is asked for."""

from ckpt.comparing import ArrayDifference, compare
from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Manifest,
    OtherRankError,
    committed_steps,
    manifest_key,
    manifest_name,
    manifest_path,
    objects_dir,
    read_manifest,
)
from ckpt.garbage import Garbage, find_garbage, remove_garbage, remove_uncommitted
from ckpt.lineage import Link, read_lineage, spec_differences
from ckpt.loading import find_damage, load, open_group, read_box, read_box_into, verify
from ckpt.locations import Location, as_location, open_store
from ckpt.messages import TIERS, Event, Tier, TierName
from ckpt.opened import OpenCheckpoint, StoredArray
from ckpt.opened import open_checkpoint as open  # noqa: A004
from ckpt.peer import address_towards
from ckpt.resharding import reshard
from ckpt.retention import Removal, Retention, RetentionPlan, plan_retention, retain
from ckpt.retrying import Retrying
from ckpt.saver import Saver
from ckpt.saving import Agree, SaveInfo, save
from ckpt.store import LocalStore, Store
from ckpt.stream import save_streamed
from ckpt.tensors import ArraySpec, LocalArray
from ckpt.tiers import fingerprint, forget, reachable

__all__ = [
    "TIERS",
    "Agree",
    "ArrayDifference",
    "ArrayRecord",
    "ArraySpec",
    "CheckpointError",
    "Event",
    "Garbage",
    "Link",
    "LocalArray",
    "LocalStore",
    "Location",
    "Manifest",
    "OpenCheckpoint",
    "OtherRankError",
    "Removal",
    "Retention",
    "RetentionPlan",
    "Retrying",
    "SaveInfo",
    "Saver",
    "Store",
    "StoredArray",
    "Tier",
    "TierName",
    "address_towards",
    "as_location",
    "committed_steps",
    "compare",
    "find_damage",
    "find_garbage",
    "fingerprint",
    "forget",
    "load",
    "manifest_key",
    "manifest_name",
    "manifest_path",
    "objects_dir",
    "open",
    "open_group",
    "open_store",
    "plan_retention",
    "reachable",
    "read_box",
    "read_box_into",
    "read_lineage",
    "read_manifest",
    "remove_garbage",
    "remove_uncommitted",
    "reshard",
    "retain",
    "save",
    "save_streamed",
    "spec_differences",
    "verify",
]
