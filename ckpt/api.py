"""The names that ``ckpt`` has; imported when the first of them is asked for."""

from ckpt.format import (
    ArrayRecord,
    CheckpointError,
    Manifest,
    OtherRankError,
    committed_steps,
    manifest_path,
    objects_dir,
    read_manifest,
)
from ckpt.load import load, open_group, read_box, verify
from ckpt.reshard import reshard
from ckpt.retain import remove_uncommitted, retain
from ckpt.save import Agree, SaveInfo, save
from ckpt.stream import save_streamed
from ckpt.tensors import ArraySpec, LocalArray

__all__ = [
    "Agree",
    "ArrayRecord",
    "ArraySpec",
    "CheckpointError",
    "LocalArray",
    "Manifest",
    "OtherRankError",
    "SaveInfo",
    "committed_steps",
    "load",
    "manifest_path",
    "objects_dir",
    "open_group",
    "read_box",
    "read_manifest",
    "remove_uncommitted",
    "reshard",
    "retain",
    "save",
    "save_streamed",
    "verify",
]
