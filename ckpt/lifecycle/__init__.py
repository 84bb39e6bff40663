"""Which checkpoints a store has, which of them are kept, and how the others are removed."""

from ckpt.lifecycle.config import Retention
from ckpt.lifecycle.garbage import Garbage, find_garbage, remove_garbage, remove_uncommitted
from ckpt.lifecycle.lineage import Link, read_lineage, spec_differences
from ckpt.lifecycle.reachable import fingerprint, prune, reachable
from ckpt.lifecycle.removal import (
    REMOVED,
    committed_save_ids,
    first_problem,
    mark_for_removal,
    remove_objects,
)
from ckpt.lifecycle.retention import Removal, RetentionPlan, plan_retention, retain

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
    "first_problem",
    "mark_for_removal",
    "plan_retention",
    "prune",
    "reachable",
    "read_lineage",
    "remove_garbage",
    "remove_objects",
    "remove_uncommitted",
    "retain",
    "spec_differences",
]
