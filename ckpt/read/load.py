"""Loading a checkpoint into this rank's slices of its arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ckpt.errors import CheckpointError
from ckpt.format import ArrayRecord, Extra, Manifest, Missing, ObjectLayout, renamed
from ckpt.read.box import read_one
from ckpt.store import THREADS, Location, open_store
from parallel.layout import Box, box_shape, cells

if TYPE_CHECKING:
    from ckpt.local_array import LocalArray


def load(
    root: Location,
    manifest: Manifest,
    arrays: Sequence[LocalArray],
    rename: Mapping[str, str] | None = None,
    missing: Missing = "refuse",
    *,
    extra: Extra = "refuse",
) -> list[str]:
    """Fill this rank's slices in place; the checkpoint may have been saved under any topology.

    Several objects are read at a time, directly into tensors in host memory.

    Args:
        root: the checkpoint folder or store.
        manifest: the checkpoint.
        arrays: this rank's slices.
        rename: names of ``arrays`` by names in the checkpoint; see :func:`ckpt.format.renamed`.
        missing: whether an array that the checkpoint lacks is an error, or keeps its values.
        extra: whether an array of the checkpoint that is not among ``arrays`` is an error, or is
            not read. An array of which this rank holds no slice may be among ``arrays``.

    Returns:
        The names of the arrays that the checkpoint lacks.

    Raises:
        CheckpointError: before any tensor is changed, where the checkpoint lacks an array, has an
            array too many, or has another shape or dtype; later, where an object is missing, short
            or damaged. The tensors hold unverified numbers then.
    """
    for array in arrays:
        if not hasattr(array, "spec"):
            raise TypeError(
                f"arrays ({type(array).__name__}) must be LocalArrays; ckpt.load_state_dict fills "
                f"a state dict"
            )
    store = open_store(root)
    names = renamed([record.name for record in manifest.arrays], rename or {})
    wanted = {array.spec.name for array in arrays}
    for new, old in names.items():
        if new != old and new not in wanted:
            raise CheckpointError(f"rename of {old}: the model has no array {new}")
    kept = [n for n in wanted if n not in names] if missing == "keep" else []
    taken = [array for array in arrays if array.spec.name not in kept]
    records = [_matching(manifest, array, names) for array in taken]
    stray = sorted(names[name] for name in names.keys() - wanted)
    if stray and extra == "refuse":
        more = f" and {len(stray) - 1} more" if len(stray) > 1 else ""
        raise CheckpointError(
            f"checkpoint array {stray[0]}{more} must be among the arrays to load; "
            f'pass extra="ignore" to leave out what is not asked for'
        )
    parts = [
        (array, box, ObjectLayout(record, coordinates))
        for array, record in zip(taken, records, strict=True)
        for box in array.boxes
        for coordinates in cells(box, record.shard_shape)
    ]

    # Largest first: no thread ends with a large object while the others idle.
    parts.sort(key=lambda part: -part[2].length)

    def read(part: tuple[LocalArray, Box, ObjectLayout]) -> int:
        array, box, layout = part
        return read_one(store, manifest, layout, box, array)

    with ThreadPoolExecutor(THREADS) as pool:
        count = sum(pool.map(read, parts))
    boxes = [box for array in taken for box in array.boxes]
    expected = sum(math.prod(box_shape(box)) for box in boxes)
    assert count == expected, "the chunks read do not cover the arrays"
    return sorted(kept)


def _matching(manifest: Manifest, array: LocalArray, names: Mapping[str, str]) -> ArrayRecord:
    spec = array.spec
    record = manifest.array(names.get(spec.name, spec.name))
    found = (record.shape, record.logical_dtype, record.attributes)
    wanted = (spec.shape, spec.logical_dtype, dict(spec.attributes))
    for what, a, b in zip(("shape", "dtype", "attributes"), found, wanted, strict=True):
        if a != b:
            raise CheckpointError(
                f"checkpoint array {spec.name} has {what} {_short(a)} but the model needs "
                f"{_short(b)}"
            )
    return record


def _short(value: object) -> str:
    """A value in an error: a forged manifest may have numbers of thousands of digits."""
    text = str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
