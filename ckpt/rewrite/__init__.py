"""Making one checkpoint from another in bounded memory; an interrupted rewrite resumes."""

from ckpt.rewrite.checkpoint_target import CheckpointTarget
from ckpt.rewrite.description import described, is_described
from ckpt.rewrite.edits import (
    Converted,
    Described,
    Extent,
    Rows,
    Selected,
    Stacked,
    Transposed,
    Unstacked,
)
from ckpt.rewrite.engine import LEAST_MEMORY, rewrite
from ckpt.rewrite.folder_target import Checked, FolderTarget, split_into_files
from ckpt.rewrite.reshard import MEMORY, reshard, write_checkpoint
from ckpt.rewrite.slabs import row_major_boxes
from ckpt.rewrite.source import CheckpointSource, Source, SourceArray, SourceInfo, changed
from ckpt.rewrite.target import Part, Receipt, Target

__all__ = [
    "LEAST_MEMORY",
    "MEMORY",
    "Checked",
    "CheckpointSource",
    "CheckpointTarget",
    "Converted",
    "Described",
    "Extent",
    "FolderTarget",
    "Part",
    "Receipt",
    "Rows",
    "Selected",
    "Source",
    "SourceArray",
    "SourceInfo",
    "Stacked",
    "Target",
    "Transposed",
    "Unstacked",
    "changed",
    "described",
    "is_described",
    "reshard",
    "rewrite",
    "row_major_boxes",
    "split_into_files",
    "write_checkpoint",
]
