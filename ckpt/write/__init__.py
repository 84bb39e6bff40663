"""The commit protocol: each rank writes its own objects, then one manifest is published."""

from ckpt.write.commit import (
    Receipt,
    SaveAbandonedError,
    SaveInfo,
    abandonment_reported,
    begin,
    check_not_abandoned,
    commit,
    discard,
    failure_of_others,
    finished_ranks,
    read_receipts,
    write_failure,
    write_receipt,
)
from ckpt.write.objects import WRITERS, sync, write_metadata
from ckpt.write.ownership import own_cells
from ckpt.write.save import save

__all__ = [
    "WRITERS",
    "Receipt",
    "SaveAbandonedError",
    "SaveInfo",
    "abandonment_reported",
    "begin",
    "check_not_abandoned",
    "commit",
    "discard",
    "failure_of_others",
    "finished_ranks",
    "own_cells",
    "read_receipts",
    "save",
    "sync",
    "write_failure",
    "write_metadata",
    "write_receipt",
]
