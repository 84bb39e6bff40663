"""A synchronous save: every rank writes its own objects, then one rank the manifest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from ckpt.errors import CheckpointError, OtherRankError
from ckpt.format import Manifest, ObjectLayout
from ckpt.store import Location, Store, open_store
from ckpt.write.commit import (
    SaveInfo,
    abandonment_reported,
    begin,
    check_not_abandoned,
    commit,
    discard,
    read_receipts,
    write_receipt,
)
from ckpt.write.objects import sync, write_metadata, write_objects
from ckpt.write.ownership import own_cells

if TYPE_CHECKING:
    from ckpt.local_array import LocalArray


Agree = Callable[[bool], bool]
"""A barrier with a vote: called on every rank, returns on each whether all ranks passed True."""


def save(
    root: Location, info: SaveInfo, arrays: Sequence[LocalArray], rank: int, agree: Agree
) -> Manifest | None:
    """Write and commit a checkpoint; every rank calls with the same arrays in the same order.

    Each rank computes from the topology which objects it writes, and publishes a receipt of them.
    The first rank reads the receipts, checks that no object is missing, and publishes the manifest
    last; an existing manifest is never replaced.

    Args:
        root: the checkpoint folder or store, shared by all ranks.
        info: what the manifest holds besides the arrays.
        arrays: this rank's slices; a rank that holds no part of an array passes it with no boxes.
        rank: this rank.
        agree: see :data:`Agree`; ``lambda ok: ok`` where there is one process.

    Returns:
        The manifest, durable, on the first rank; None elsewhere.

    Raises:
        CheckpointError: on every rank, where any rank could not write; no checkpoint is committed
            then, and the written objects are removed.
    """
    for array in arrays:
        if not hasattr(array, "spec"):
            raise TypeError(
                f"arrays ({type(array).__name__}) must be LocalArrays; ckpt.save_state_dict saves "
                f"a state dict"
            )
    store = open_store(root)
    records = [array.spec.record(info.topology, info.compression) for array in arrays]
    failure: Exception | None = None
    try:
        begin(store, info, rank)
        with abandonment_reported(store, info, rank):
            receipt = write_metadata(store, info, records) if rank == info.writers[0] else {}
            todo = []
            for array, record in zip(arrays, records, strict=True):
                layout = array.spec.layout(info.topology)
                for coordinates in own_cells(record, layout, rank, info.ranks):
                    todo.append((ObjectLayout(record, coordinates), array.read_into))
            # Largest first: no thread ends with a large one.
            todo.sort(key=lambda one: -one[0].length)
            receipt |= write_objects(store, info, todo)
            sync(store, info, receipt)
            check_not_abandoned(store, info, rank)
            write_receipt(store, info, rank, receipt)
    except Exception as error:  # of any kind: the other ranks must learn that this one failed
        failure = error
    if not agree(failure is None):
        _abandon(store, info, failure)

    manifest: Manifest | None = None
    if rank == info.writers[0]:
        try:
            with abandonment_reported(store, info, rank):
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
    discard(store, info)  # no rank is still writing: all have voted
    if not isinstance(failure, OSError):
        raise failure
    raise CheckpointError(f"{what}: {failure.strerror}: {failure.filename or store.where()}")
