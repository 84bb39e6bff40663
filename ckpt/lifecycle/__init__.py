"""Which checkpoints a store has, which of them are kept, and how the others are removed."""

from ckpt.lifecycle.config import Retention as Retention
from ckpt.lifecycle.garbage import remove_uncommitted as remove_uncommitted
from ckpt.lifecycle.lineage import Link as Link
from ckpt.lifecycle.lineage import spec_differences as spec_differences
from ckpt.lifecycle.reachable import fingerprint as fingerprint
from ckpt.lifecycle.reachable import prune as prune
from ckpt.lifecycle.reachable import reachable as reachable
from ckpt.lifecycle.removal import REMOVED as REMOVED
from ckpt.lifecycle.removal import committed_save_ids as committed_save_ids
from ckpt.lifecycle.removal import first_problem as first_problem
from ckpt.lifecycle.removal import has_manifest as has_manifest
from ckpt.lifecycle.removal import mark_for_removal as mark_for_removal
from ckpt.lifecycle.removal import remove_objects as remove_objects
from ckpt.lifecycle.retention import plan_retention as plan_retention
from ckpt.lifecycle.retention import retain as retain
