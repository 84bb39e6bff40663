"""What a checkpoint is on disk: names, records, the manifest, and zarr's metadata.

::

    ROOT/manifests/step-00000300.json             written last; it exists if and only if the
                                                  checkpoint exists
    ROOT/objects/SAVE_ID/zarr.json                a zarr v3 group ...
    ROOT/objects/SAVE_ID/model/embed/weight/      ... of stacked arrays
        zarr.json
        c/0/0                                     one object: a zarr shard, one writer

Everything under a save id is immutable. The manifest lists every object with its length and a
checksum, those of an array in row-major order of its grid, so that a missing one is an error and
never zarr's fill value.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from crc32c import crc32c
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from ckpt.locations import Location, open_store
from ckpt.objects import ObjectRecord, Objects, Stored, object_key
from parallel.layout import Box, ShardLayout, Topology, cells, count_cells

# How a logical dtype is stored. zarr has no bfloat16 or float8: they are kept as bit patterns.
STORAGE_DTYPES = {
    "float64": "float64",
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "uint16",
    "float8_e4m3fn": "uint8",
    "float8_e5m2": "uint8",
    "int64": "int64",
    "int32": "int32",
    "int16": "int16",
    "int8": "int8",
    "uint8": "uint8",
    "bool": "bool",
}


Compression = Literal["none", "zstd"]
"""What chunks are compressed with."""
ZSTD_LEVEL = 1
MOST_CHUNK_BYTES = 1 << 32
"""Of one chunk. Whoever reads it needs as much memory, whatever the object's length."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or is not whole, or is not the one asked for."""


class OtherRankError(CheckpointError):
    """This rank did its part; another could not, and says why."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


_ONE_RANK = Topology()
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Size = Annotated[int, Field(ge=1, lt=1 << 63)]
_PART = re.compile(r"(?!\.{1,2}$|zarr\.json$)[^/\\\x00-\x1f\x7f]+")


def _check_name(name: str) -> str:
    # It becomes part of a path, and whoever wrote the manifest need not be a friend.
    if not all(map(_PART.fullmatch, name.split("/"))):
        raise ValueError(f"{name!r} must be parts with '/' between, none of them '.' or '..'")
    return name


def _check_save_id(name: str) -> str:
    if "/" in _check_name(name) or name.startswith("."):
        raise ValueError(f"{name!r} must be one part that does not begin with '.'")
    return name


def _check_topology(degrees: dict[str, int]) -> dict[str, int]:
    unknown = sorted(degrees.keys() - _ONE_RANK.as_dict().keys())
    if unknown:
        raise ValueError(f"{unknown[0]!r} is no axis")
    Topology(**degrees)
    return degrees


class ArrayRecord(_Record):
    """One stored array. Shapes are logical; ``splits`` is as in ShardLayout."""

    name: Annotated[str, AfterValidator(_check_name)]
    shape: tuple[_Count, ...]
    logical_dtype: str
    splits: tuple[tuple[str, ...], ...]
    shard_shape: tuple[_Size, ...]
    chunk_shape: tuple[_Size, ...]
    compression: Compression = "none"
    stages: tuple[int, ...] = ()
    """As in ShardLayout, of the topology that it was saved under."""
    attributes: dict[str, Any] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.logical_dtype not in STORAGE_DTYPES:
            raise ValueError(f"{self.name} has dtype {self.logical_dtype!r}")
        dims = [self.shape, self.splits, self.shard_shape, self.chunk_shape]
        if len({len(each) for each in dims}) > 1:
            raise ValueError(f"{self.name} has shapes and splits of differing length")
        for size, shard, chunk in zip(self.shape, self.shard_shape, self.chunk_shape, strict=True):
            if shard % chunk or chunk > max(size, 1) or shard >= max(size, 1) + chunk:
                raise ValueError(
                    f"{self.name} has a dim of {size} in objects of {shard} in chunks of {chunk}"
                )
        if math.prod(self.chunk_shape) * self.dtype.itemsize > MOST_CHUNK_BYTES:
            raise ValueError(f"{self.name} has a chunk of more than {MOST_CHUNK_BYTES} bytes")
        self.layout(_ONE_RANK)
        if self.attributes:
            _dump(self.attributes)  # a number that is none is not JSON
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored numbers."""
        return np.dtype(STORAGE_DTYPES[self.logical_dtype])

    def layout(self, topology: Topology) -> ShardLayout:
        """Who holds which slice under the ``topology`` that it was saved under."""
        return ShardLayout(self.shape, self.splits, topology, self.stages)

    def object_keys(self) -> Iterator[str]:
        """The key of every object of this array, below its save id."""
        whole = tuple((0, size) for size in self.shape)
        for coordinates in cells(whole, self.shard_shape):
            yield object_key(self.name, coordinates)


class Manifest(_Record):
    """A committed checkpoint. ``state`` is the saver's own, plain JSON."""

    format: Literal["convoy-checkpoint"] = "convoy-checkpoint"
    format_version: Literal[2] = 2
    save_id: Annotated[str, AfterValidator(_check_save_id)]
    step: _Count
    created: str
    topology: Annotated[dict[str, int], AfterValidator(_check_topology)]
    ranks: tuple[int, ...] | None = None
    """The ranks whose slices are here, where a store has only some: those of a node."""
    parent: Annotated[str, AfterValidator(_check_save_id)] | None = None
    """The save id of the checkpoint that this one was made of, where that was not by training."""
    arrays: list[ArrayRecord]
    metadata: dict[str, ObjectRecord]
    """Every zarr.json, by its key below the save id."""
    stored: list[Stored]
    """The objects of each of ``arrays``, in turn."""
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
            parts = name.split("/")
            for depth in range(1, len(parts)):
                if "/".join(parts[:depth]) in names:
                    raise ValueError(f"{name} is inside of another array")
        world, ranks = Topology(**self.topology).world, self.ranks
        if ranks is not None and not (ranks and len(set(ranks)) == len(ranks)):
            raise ValueError("ranks must be some, and each once")
        if ranks is not None and not (min(ranks) >= 0 and max(ranks) < world):
            raise ValueError(f"ranks must be below {world}")
        return self

    def array(self, name: str) -> ArrayRecord:
        """The record of one array. Raises CheckpointError where there is none."""
        for record in self.arrays:
            if record.name == name:
                return record
        raise CheckpointError(f"checkpoint step {self.step} has no array {name}")

    def boxes(self, record: ArrayRecord) -> list[Box]:
        """The parts of an array that are here; they have nothing in common."""
        if self.ranks is None:
            return [tuple((0, size) for size in record.shape)]
        layout = record.layout(Topology(**self.topology))
        return list(dict.fromkeys(box for rank in self.ranks for box in layout.boxes(rank)))

    def coordinates(self, record: ArrayRecord) -> Iterator[tuple[int, ...]]:
        """Where in an array the objects are that are here."""
        found = (cells(box, record.shard_shape) for box in self.boxes(record))
        return itertools.chain.from_iterable(found)

    def count(self, record: ArrayRecord) -> int:
        """How many :meth:`coordinates` there are, without going through them."""
        return sum(count_cells(box, record.shard_shape) for box in self.boxes(record))

    def sorted_coordinates(self, record: ArrayRecord) -> list[tuple[int, ...]] | None:
        """Where in an array the objects are that are here, in row-major order; None for all."""
        return None if self.ranks is None else sorted(set(self.coordinates(record)))

    @cached_property
    def objects(self) -> Objects:
        """Every object by its key below the save id."""
        return Objects(self.arrays, self.metadata, self.stored, self.sorted_coordinates)

    @property
    def total_bytes(self) -> int:
        """Bytes of all objects."""
        metadata = sum(record.bytes for record in self.metadata.values())
        return metadata + sum(stored.total_bytes for stored in self.stored)


def objects_key(save_id: str) -> str:
    """Where one save's objects are, themselves a zarr group."""
    return f"objects/{save_id}"


def pending_key(save_id: str) -> str:
    """There is something here while a save's objects are listed by no manifest: not yet, or no
    more. Ranks tell what they have written by receipts here."""
    return f"objects/.pending-{save_id}"


def manifest_key(step: int) -> str:
    """The manifest of one step."""
    return f"manifests/step-{step:08d}.json"


def manifest_name(root: Location, step: int) -> str:
    """The same in any store, for people."""
    return open_store(root).where(manifest_key(step))


def keys_of_ranks(record: ArrayRecord, layout: ShardLayout, ranks: Iterable[int]) -> Iterator[str]:
    """The key of every object that any of ``ranks`` holds a part of; some come more than once."""
    for rank in ranks:
        for box in layout.boxes(rank):
            for coordinates in cells(box, record.shard_shape):
                yield object_key(record.name, coordinates)


def objects_dir(root: Path, save_id: str) -> Path:
    """The folder of one save's objects, itself a zarr group."""
    return root / objects_key(save_id)


def manifest_path(root: Path, step: int) -> Path:
    """The manifest of one step in a folder."""
    return root / manifest_key(step)


def metadata_objects(arrays: list[ArrayRecord]) -> dict[str, bytes]:
    """Every zarr.json of a save: the groups on the way, and each array's."""
    files = {"zarr.json": _group_metadata()}
    for record in arrays:
        parts = record.name.split("/")
        for depth in range(1, len(parts)):
            files["/".join((*parts[:depth], "zarr.json"))] = _group_metadata()
        files[f"{record.name}/zarr.json"] = _array_metadata(record)
    return files


def _group_metadata() -> bytes:
    return _dump({"zarr_format": 3, "node_type": "group", "attributes": {}})


def _array_metadata(record: ArrayRecord) -> bytes:
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    zstd = {"name": "zstd", "configuration": {"level": ZSTD_LEVEL, "checksum": False}}
    compression = [zstd] if record.compression == "zstd" else []
    sharding = {
        "chunk_shape": record.chunk_shape,
        "codecs": [little, *compression, {"name": "crc32c"}],
        "index_codecs": [little, {"name": "crc32c"}],
        "index_location": "end",
    }
    return _dump(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": record.shape,
            "data_type": record.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": record.shard_shape},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": False if record.dtype == np.bool_ else 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"logical_dtype": record.logical_dtype, **record.attributes},
        }
    )


def _dump(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode_manifest(manifest: Manifest) -> bytes:
    """The manifest's bytes, with a checksum of their own."""
    body = _dump(manifest.model_dump(mode="json"))
    return b'{"crc32c":%d,"manifest":%s}\n' % (crc32c(body), body)


_ENVELOPE = re.compile(rb'\{"crc32c":(\d{1,10}),"manifest":(.*)\}\n', re.DOTALL)


def decode_manifest(data: bytes, where: str) -> Manifest:
    """The inverse. Raises CheckpointError for any changed byte, naming the file."""
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
    # It may be anyone's: one line of it, and not more.
    return text if len(text) < 300 and text.isprintable() else f"{text[:300]!a} ..."


def _check_coverage(manifest: Manifest, where: str) -> None:
    expected, listed = metadata_objects(manifest.arrays).keys(), manifest.metadata.keys()
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
        # They are in the order of the grid: as many as there must be are those that must be.
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

    Raises CheckpointError where there is none, or where it is damaged: an older one is never
    taken silently in its place.
    """
    store = open_store(root)
    steps = committed_steps(store)
    if step is None:
        if not steps:
            inner = "checkpoints"
            hint = f"; did you mean {store.where(inner)}?" if store.names(inner) else ""
            where = store.where()
            raise CheckpointError(f"no checkpoint in {where}: no manifest in its manifests/{hint}")
        step = steps[-1]
    elif step not in steps:
        raise CheckpointError(f"no checkpoint of step {step} in {store.where()}; there are {steps}")
    where = store.where(manifest_key(step))
    try:
        data = store.read(manifest_key(step))
    except OSError as error:
        raise CheckpointError(f"manifest {where} cannot be read: {error.strerror}") from None
    manifest = decode_manifest(data, where)
    if manifest.step != step:
        raise CheckpointError(f"manifest {where} is of step {manifest.step}; it was renamed")
    return manifest


def committed_steps(root: Location) -> list[int]:
    """The steps that have a manifest, ascending. Raises CheckpointError where nobody can tell."""
    store = open_store(root)
    try:
        names = store.names("manifests")
    except OSError as error:
        where = store.where("manifests")
        raise CheckpointError(f"{where} cannot be read: {error.strerror}") from None
    found = (re.fullmatch(r"step-([0-9]{8,18})\.json", name) for name in names)
    steps = {int(match[1]): match[0] for match in found if match}
    return sorted(step for step, name in steps.items() if manifest_key(step).endswith(name))
