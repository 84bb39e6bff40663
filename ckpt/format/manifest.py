"""The manifest, the file that makes a checkpoint.

::

    ROOT/manifests/step-00000300.json             written last; it exists if and only if the
                                                  checkpoint exists
    ROOT/objects/SAVE_ID/zarr.json                a zarr v3 group ...
    ROOT/objects/SAVE_ID/model/embed/weight/      ... of stacked arrays
        zarr.json
        c.0.0                                     one object: a zarr shard, one writer

Everything under a save id is immutable. The manifest lists every object with its length and a
checksum, in row-major order of each array's grid: a missing object is an error, and is never read
as zarr's fill value.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from crc32c import crc32c
from pydantic import AfterValidator, ValidationError, model_validator

from ckpt.errors import CheckpointError, readable
from ckpt.format.array import (
    ONE_RANK,
    ArrayRecord,
    Count,
    check_name,
    dump,
    groups_of,
    metadata_keys,
)
from ckpt.format.keys import manifest_key
from ckpt.format.object_index import ObjectRecord, Objects, Record, Stored
from ckpt.format.packed import PackedTensor, PackPlace, StoredTensor, place
from ckpt.store import LocalStore, Location, open_store
from parallel.layout import Box, Topology, cells, count_cells, whole_box


def _check_save_id(name: str) -> str:
    if "/" in check_name(name) or name.startswith("."):
        raise ValueError(f"{name!r} must be one part that does not begin with '.'")
    return name


def _check_topology(degrees: dict[str, int]) -> dict[str, int]:
    unknown = sorted(degrees.keys() - ONE_RANK.as_dict().keys())
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no axis")
    Topology(**degrees)
    return degrees


class Manifest(Record):
    """A committed checkpoint. ``state`` is plain JSON for the trainer; this package only reads the
    properties below from it."""

    format: Literal["convoy-checkpoint"] = "convoy-checkpoint"
    format_version: Literal[4] = 4
    save_id: Annotated[str, AfterValidator(_check_save_id)]
    step: Count
    created: str
    topology: Annotated[dict[str, int], AfterValidator(_check_topology)]
    ranks: tuple[int, ...] | None = None
    """The ranks whose slices this store has: those of a node; None for all ranks."""
    parent: Annotated[str, AfterValidator(_check_save_id)] | None = None
    """The save id of the checkpoint that this one was converted from; None for a trainer's save."""
    arrays: list[ArrayRecord]
    metadata: dict[str, ObjectRecord]
    """Every zarr.json by its key below the save id."""
    stored: list[Stored]
    """The objects of each array, in the order of ``arrays``."""
    packed: tuple[PackedTensor, ...] = ()
    """Tensors that lie in packs; a pack is one of ``arrays``."""
    state: dict[str, Any]
    spec: dict[str, Any]
    spec_hash: str
    versions: dict[str, str]

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = {record.name for record in self.arrays}
        if len(names) < len(self.arrays):
            raise ValueError("two arrays have one name")
        for name in names:
            if not names.isdisjoint(groups_of(name)):
                raise ValueError(f"{name} is inside another array")
        self._check_packed(names)
        world, ranks = Topology(**self.topology).world, self.ranks
        if ranks is not None and not (ranks and len(set(ranks)) == len(ranks)):
            raise ValueError("ranks must not be empty and must not repeat")
        if ranks is not None and not (min(ranks) >= 0 and max(ranks) < world):
            raise ValueError(f"ranks must be below {world}")
        return self

    def _check_packed(self, names: set[str]) -> None:
        packs = {record.name: record for record in self.arrays if record.mesh is not None}
        for tensor in self.packed:
            if tensor.name in names:
                raise ValueError("two arrays have one name")
            names.add(tensor.name)
            place(tensor, packs)  # raises where the tensor has no place

    @cached_property
    def packs(self) -> dict[str, PackPlace]:
        """The packed tensors by name."""
        records = {record.name: record for record in self.arrays}
        return {one.name: PackPlace(one, records[one.pack]) for one in self.packed}

    @cached_property
    def tensors(self) -> dict[str, StoredTensor]:
        """Every tensor that was saved, by name: arrays that are no packs, and packed tensors."""
        holders = {one.pack for one in self.packed}
        own = {record.name: record for record in self.arrays if record.name not in holders}
        return {**own, **self.packs}

    def array(self, name: str) -> ArrayRecord:
        """The record of one array. Raises CheckpointError where there is none."""
        for record in self.arrays:
            if record.name == name:
                return record
        raise CheckpointError(f"checkpoint step {self.step} has no array {name}")

    def boxes(self, record: ArrayRecord) -> list[Box]:
        """The parts of an array that this store has; they do not overlap."""
        if self.ranks is None:
            return [whole_box(record.shape)]
        layout = record.layout(Topology(**self.topology))
        return list(dict.fromkeys(box for rank in self.ranks for box in layout.boxes(rank)))

    def coordinates(self, record: ArrayRecord) -> Iterator[tuple[int, ...]]:
        """The grid coordinates of an array's objects that this store has, in no fixed order."""
        found = (cells(box, record.shard_shape) for box in self.boxes(record))
        return itertools.chain.from_iterable(found)

    def count(self, record: ArrayRecord) -> int:
        """The number of :meth:`coordinates`, computed without listing them."""
        return sum(count_cells(box, record.shard_shape) for box in self.boxes(record))

    def sorted_coordinates(self, record: ArrayRecord) -> list[tuple[int, ...]] | None:
        """The grid coordinates of an array's objects that this store has, in row-major order; None
        for all objects of the array."""
        return None if self.ranks is None else sorted(set(self.coordinates(record)))

    @cached_property
    def objects(self) -> Objects:
        """Every object by its key below the save id."""
        return Objects(self.arrays, self.metadata, self.stored, self.sorted_coordinates)

    @property
    def launch(self) -> str:
        """The launch that saved this checkpoint: the save id without the step in front."""
        return self.save_id.removeprefix(f"{self.step:08d}-")

    @property
    def validation(self) -> float | None:
        """The validation loss that the trainer put into ``state``; None where there is no finite
        number."""
        value = self.state.get("validation")
        is_number = isinstance(value, int | float) and -math.inf < value < math.inf
        return value if is_number else None

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects."""
        metadata = sum(record.bytes for record in self.metadata.values())
        return metadata + sum(stored.total_bytes for stored in self.stored)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the manifest's file: JSON with a checksum."""
    body = dump(manifest.model_dump(mode="json"))
    return b'{"crc32c":%d,"manifest":%s}\n' % (crc32c(body), body)


_ENVELOPE = re.compile(rb'\{"crc32c":(\d{1,10}),"manifest":(.*)\}\n', re.DOTALL)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """The manifest in a file's bytes.

    Raises CheckpointError, with ``where`` in the message, where any byte was changed.
    """
    match = _ENVELOPE.fullmatch(data)
    if match is None or crc32c(match[2]) != int(match[1]):
        raise CheckpointError(f"manifest {where} is damaged: its checksum does not match")
    try:
        manifest = Manifest.model_validate_json(match[2])
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        what = _shown(f"{field}: {first['msg']}")
        raise CheckpointError(f"manifest {where} is not of this format: {what}") from None
    _check_coverage(manifest, where)
    return manifest


def _shown(text: str) -> str:
    # The text may come from a forged manifest: show one short line of it.
    return text if len(text) < 300 and text.isprintable() else f"{text[:300]!a} ..."


def _check_coverage(manifest: Manifest, where: str) -> None:
    expected, listed = metadata_keys(manifest.arrays).keys(), manifest.metadata.keys()
    for what, names in (("lacks", expected - listed), ("has a stray", listed - expected)):
        if names:
            name, count = _shown(min(names)), len(names)
            raise CheckpointError(f"manifest {where} {what} object {name} ({count} in all)")
    if len(manifest.stored) != len(manifest.arrays):
        raise CheckpointError(
            f"manifest {where} lists the objects of {len(manifest.stored)} arrays, and has "
            f"{len(manifest.arrays)}"
        )
    for record, stored in zip(manifest.arrays, manifest.stored, strict=True):
        # Objects are listed in the order of the grid, without keys: only their number can be wrong.
        count = manifest.count(record)
        if count != len(stored.checksums) or not stored.is_even:
            raise CheckpointError(
                f"manifest {where} lacks objects of {_shown(record.name)}, or has stray ones: it "
                f"lists {len(stored.checksums)} of {count}"
            )
        here = manifest.sorted_coordinates(record)
        if here is not None and len(here) != count:
            name = _shown(record.name)
            raise CheckpointError(f"manifest {where} has objects of {name} that slices cut")


def read_manifest(root: Location, step: int | None = None) -> Manifest:
    """The manifest of ``step``, or of the newest one.

    Raises CheckpointError where there is no such manifest, or where the manifest is damaged; an
    older manifest is never read in its place.
    """
    store = open_store(root)
    steps = committed_steps(store)
    if step is None:
        if not steps:
            where, inner = store.where(), "checkpoints"
            if isinstance(store, LocalStore) and not store.root.exists():
                raise CheckpointError(f"no checkpoint in {where}: there is no such folder")
            hint = f"; did you mean {store.where(inner)}?" if store.names(inner) else ""
            raise CheckpointError(f"no checkpoint in {where}: no manifest in its manifests/{hint}")
        step = steps[-1]
    elif step not in steps:
        raise CheckpointError(f"no checkpoint of step {step} in {store.where()}; there are {steps}")
    where = store.where(manifest_key(step))
    with readable(f"manifest {where}"):
        data = store.read(manifest_key(step))
    try:
        manifest = decode_manifest(data, where)
    except CheckpointError as error:
        older = [each for each in steps if each < step]
        hint = f"; the checkpoint before is of step {older[-1]}" if older else ""
        raise CheckpointError(f"{error}{hint}") from None
    if manifest.step != step:
        raise CheckpointError(f"manifest {where} is of step {manifest.step}; it was renamed")
    return manifest


def committed_steps(root: Location) -> list[int]:
    """The steps that have a manifest, ascending. Raises CheckpointError where the store cannot be
    listed."""
    store = open_store(root)
    with readable(store.where("manifests")):
        names = store.names("manifests")
    found = (re.fullmatch(r"step-([0-9]{8,18})\.json", name) for name in names)
    steps = {int(match[1]): match[0] for match in found if match}
    return sorted(step for step, name in steps.items() if manifest_key(step).endswith(name))
