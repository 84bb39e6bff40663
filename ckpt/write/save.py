"""Writing a checkpoint: every rank its own objects, then one manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from ckpt.errors import CheckpointError, OtherRankError
from ckpt.format import (
    Manifest,
    ObjectLayout,
)
from ckpt.store import Location, Store, open_store
from ckpt.write.commit import SaveInfo, begin, commit, discard, leave_receipt, read_receipts
from ckpt.write.objects import settle, write_metadata, write_objects
from ckpt.write.ownership import own_cells

if TYPE_CHECKING:
    from ckpt.local_array import LocalArray


Agree = Callable[[bool], bool]
"""A barrier that also asks: every rank gives its word, all learn whether all said yes."""


def save(
    root: Location, info: SaveInfo, arrays: Sequence[LocalArray], rank: int, agree: Agree
) -> Manifest | None:
    """Write and commit a checkpoint; every rank calls with the same arrays in the same order.

    Each rank works out from the topology alone which objects are its own. It leaves a receipt of
    what it wrote; the first rank reads the receipts, checks that together they are the whole, and
    publishes the manifest last, never over another.

    Args:
        root: the checkpoint folder or store, shared by all ranks.
        info: what else the manifest holds.
        arrays: this rank's slices; a rank without any part of an array still names it.
        rank: this rank.
        agree: see :data:`Agree`; ``lambda ok: ok`` for one process.

    Returns:
        The manifest, durable, on the first rank; None elsewhere.

    Raises:
        CheckpointError: on every rank if any could not write; nothing is committed then, and
            what was written is removed.
    """
    store = open_store(root)
    records = [array.spec.record(info.topology, info.compression) for array in arrays]
    failure: Exception | None = None
    try:
        begin(store, info, rank)
        receipt = write_metadata(store, info, records) if rank == info.writers[0] else {}
        todo = []
        for array, record in zip(arrays, records, strict=True):
            layout = array.spec.layout(info.topology)
            for coordinates in own_cells(record, layout, rank, info.ranks):
                todo.append((ObjectLayout(record, coordinates), array.read_into))
        todo.sort(key=lambda one: -one[0].length)  # no large one is left for the end
        receipt |= write_objects(store, info, todo)
        settle(store, info, receipt)
        leave_receipt(store, info, rank, receipt)
    except Exception as error:  # the others must learn of it, whatever it is
        failure = error
    if not agree(failure is None):
        _abandon(store, info, failure)

    manifest: Manifest | None = None
    if rank == info.writers[0]:
        try:
            manifest = commit(store, info, records, read_receipts(store, info))
        except Exception as error:
            failure = error
    if not agree(failure is None):
        _abandon(store, info, failure)
    return manifest


def _abandon(store: Store, info: SaveInfo, failure: Exception | None) -> NoReturn:
    what = f"checkpoint of step {info.step} in {store.where()} is not saved"
    if failure is None:
        raise OtherRankError(f"{what}: another rank could not write its part")
    discard(store, info)  # every rank has stopped writing: they have all given their word
    if not isinstance(failure, OSError):
        raise failure
    raise CheckpointError(f"{what}: {failure.strerror}: {failure.filename or store.where()}")
