"""The commit protocol: each rank writes its own objects, then one manifest is published."""

from ckpt.write.commit import (
    GivenUpError,
    Receipt,
    SaveInfo,
    begin,
    commit,
    discard,
    giving_up_is_told,
    leave_failure,
    leave_receipt,
    read_receipts,
    see_that_it_goes_on,
    settled_ranks,
)
from ckpt.write.objects import WRITERS, settle, write_metadata
from ckpt.write.ownership import own_cells
from ckpt.write.save import Agree, save
from ckpt.write.stream import save_streamed

__all__ = [
    "WRITERS",
    "Agree",
    "GivenUpError",
    "Receipt",
    "SaveInfo",
    "begin",
    "commit",
    "discard",
    "giving_up_is_told",
    "leave_failure",
    "leave_receipt",
    "own_cells",
    "read_receipts",
    "save",
    "save_streamed",
    "see_that_it_goes_on",
    "settle",
    "settled_ranks",
    "write_metadata",
]
