"""The commit protocol: each rank writes its own objects, then one manifest is published."""

from ckpt.write.commit import Receipt as Receipt
from ckpt.write.commit import SaveAbandonedError as SaveAbandonedError
from ckpt.write.commit import SaveInfo as SaveInfo
from ckpt.write.commit import abandonment_reported as abandonment_reported
from ckpt.write.commit import begin as begin
from ckpt.write.commit import check_not_abandoned as check_not_abandoned
from ckpt.write.commit import commit as commit
from ckpt.write.commit import discard as discard
from ckpt.write.commit import failure_of_others as failure_of_others
from ckpt.write.commit import finished_ranks as finished_ranks
from ckpt.write.commit import read_receipts as read_receipts
from ckpt.write.commit import write_failure as write_failure
from ckpt.write.commit import write_receipt as write_receipt
from ckpt.write.objects import WRITERS as WRITERS
from ckpt.write.objects import sync as sync
from ckpt.write.objects import write_metadata as write_metadata
from ckpt.write.ownership import own_cells as own_cells
from ckpt.write.save import save as save
