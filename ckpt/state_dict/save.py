"""Saving a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from ckpt.errors import CheckpointError
from ckpt.format import TREE, Compression, check_compression, plan_packs
from ckpt.local_array import LocalArray
from ckpt.state_dict.held import Ranks, agree
from ckpt.state_dict.packing import local_arrays
from ckpt.store import Location, open_store
from ckpt.write import SaveInfo, save
from parallel.layout import Topology


def save_state_dict(
    root: Location,
    state: Mapping[str, Any],
    *,
    step: int,
    process_group: dist.ProcessGroup | None = None,
    compression: Compression = "none",
    validation: float | None = None,
) -> None:
    """Save a nested state as a checkpoint; every rank of ``process_group`` calls.

    ``state`` is a dict of tensors, DTensors, numbers, strings, bytes, None, and dicts, lists and
    tuples of these: what ``state_dict()`` of a model and of an optimizer give, and what
    ``torch.distributed.checkpoint.state_dict.get_state_dict`` gives. No other object is saved, and
    nothing is pickled. Ranks may have different keys. A plain tensor, or a number, that several
    ranks have must be equal on all of them; a DTensor may be cut in any way. Each slice is written
    by one of the ranks that hold it.

    The save is atomic: after a crash there is either the entire checkpoint or none. A step is never
    replaced. The name of the save has a random part.

    Args:
        root: the checkpoint folder or store, shared by all ranks.
        state: what to save.
        step: the number of the checkpoint, at least 0.
        process_group: the ranks that save; None for all. One process needs no process group.
        compression: of the chunks.
        validation: a validation loss, for ``Retention.keep_best``.

    Raises:
        CheckpointError: on every rank, where any rank has something in its state that cannot be
            saved, before any byte is written; where ranks differ; where ``step`` has a checkpoint
            already; where any rank could not write. No checkpoint is committed then.
        ValueError: for another ``compression`` than there is.
    """
    ranks = Ranks(process_group)
    store = open_store(root)
    info, arrays = prepared(ranks, state, step, compression, validation)
    save(store, info, arrays, ranks.rank, ranks.agree)


def prepared(
    ranks: Ranks, state: Any, step: int, compression: Compression, validation: float | None
) -> tuple[SaveInfo, list[LocalArray]]:
    """What the manifest says of a save, and this rank's slices of the arrays.

    Raises CheckpointError as :func:`save_state_dict` does, before any byte is written.
    """
    if type(step) is not int or step < 0:
        raise CheckpointError(f"step ({step!r}) must be a whole number of at least 0")
    check_compression(compression)
    mine, agreed = agree(state, ranks)
    made = plan_packs(agreed.tensors)
    with ranks.together("the state cannot be saved"):
        said: dict[str, Any] = {TREE: agreed.tree}
        if validation is not None:
            said["validation"] = float(validation)
        arrays = local_arrays(made, agreed.tensors, mine.tensors, ranks.rank)
    info = SaveInfo(
        save_id=f"{step:08d}-{agreed.token}",
        step=step,
        topology=Topology(dp_shard=ranks.world),
        state=said,
        spec={},
        spec_hash="",
        compression=compression,
        packed=made.packed,
    )
    return info, arrays
