"""Which checkpoints a store has, which of them stay, and how the others are removed."""

from ckpt.lifecycle.garbage import Garbage, find_garbage, remove_garbage, remove_uncommitted
from ckpt.lifecycle.lineage import Link, read_lineage, spec_differences
from ckpt.lifecycle.reachable import fingerprint, forget, reachable
from ckpt.lifecycle.removal import (
    REMOVED,
    committed_save_ids,
    mark_unwanted,
    remove_objects,
    what_is_wrong,
)
from ckpt.lifecycle.retention import Removal, Retention, RetentionPlan, plan_retention, retain

__all__ = [
    "REMOVED",
    "Garbage",
    "Link",
    "Removal",
    "Retention",
    "RetentionPlan",
    "committed_save_ids",
    "find_garbage",
    "fingerprint",
    "forget",
    "mark_unwanted",
    "plan_retention",
    "reachable",
    "read_lineage",
    "remove_garbage",
    "remove_objects",
    "remove_uncommitted",
    "retain",
    "spec_differences",
    "what_is_wrong",
]
