"""Reading slices of a checkpoint, verified, onto any number of ranks."""

from ckpt.read.box import PackReader, read_box, read_nowhere, read_tensor
from ckpt.read.compare import ArrayDifference, compare
from ckpt.read.load import load
from ckpt.read.stored_array import OpenCheckpoint, StoredArray, open_checkpoint
from ckpt.read.verify import find_damage, open_group, verify

__all__ = [
    "ArrayDifference",
    "OpenCheckpoint",
    "PackReader",
    "StoredArray",
    "compare",
    "find_damage",
    "load",
    "open_checkpoint",
    "open_group",
    "read_box",
    "read_nowhere",
    "read_tensor",
    "verify",
]
