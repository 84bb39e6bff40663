"""One array of a checkpoint: its shape, dtype, shards and chunks, as the manifest records them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from ckpt.format.dtypes import STORAGE_DTYPES
from ckpt.format.object_index import Record, Separator, object_key
from parallel.layout import MOST_RANKS, ShardLayout, Topology, cells, whole_box
from parallel.placements import MeshLayout, Placement, RankMesh

Compression = Literal["none", "zstd"]
"""The compression of the chunks of an array."""
COMPRESSIONS: tuple[Compression, ...] = ("none", "zstd")
ZSTD_LEVEL = 1
MOST_CHUNK_BYTES = 1 << 32
"""The limit on the length of a chunk. A reader of any part of a chunk needs that much memory."""


ONE_RANK = Topology()
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Size = Annotated[int, Field(ge=1, lt=1 << 63)]
_PART = re.compile(r"(?!\.{1,2}$|zarr\.json$)[^/\\\x00-\x1f\x7f]+")


def check_name(name: str) -> str:
    """Return ``name`` if it is safe as a relative path. Raises ValueError otherwise.

    The name comes from a manifest, which may be forged, and becomes part of a path.
    """
    if not all(map(_PART.fullmatch, name.split("/"))):
        raise ValueError(f"{name!r} must be parts with '/' between, none of them '.' or '..'")
    return name


def groups_of(name: str) -> Iterator[str]:
    """The groups that an array is in, from the outermost: ``a`` and ``a/b`` of ``a/b/c``."""
    parts = name.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def check_compression(name: str) -> None:
    """Raises ValueError for the name of no compression."""
    if name not in COMPRESSIONS:
        raise ValueError(f"compression ({name!r}) must be one of {', '.join(COMPRESSIONS)}")


@lru_cache(maxsize=1 << 8)
def _mesh(shape: tuple[int, ...], runs: tuple[tuple[int, int, int], ...]) -> RankMesh:
    # Cached: the records of hundreds of arrays name the same few meshes.
    ranks = tuple(first + i * step for first, count, step in runs for i in range(count))
    return RankMesh(shape, ranks)


class MeshRecord(Record):
    """A mesh of ranks: its shape, and the ranks in row-major order.

    ``ranks`` is run-length encoded: each entry is (first rank, count, step).
    """

    shape: tuple[_Size, ...]
    ranks: tuple[tuple[Count, _Size, int], ...]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if sum(count for _, count, _ in self.ranks) > MOST_RANKS:
            raise ValueError(f"a mesh has more than {MOST_RANKS} ranks")
        self.mesh  # noqa: B018 - raises for a mesh that has no rank, or two, for a place
        return self

    @cached_property
    def mesh(self) -> RankMesh:
        """The mesh."""
        return _mesh(self.shape, self.ranks)

    @classmethod
    def of(cls, mesh: RankMesh) -> MeshRecord:
        """The record of a mesh."""
        runs: list[tuple[int, int, int]] = []
        for rank in mesh.ranks:
            first, count, step = runs[-1] if runs else (0, 0, 0)
            if count and (count == 1 or rank == first + count * step):
                runs[-1] = (first, count + 1, step if count > 1 else rank - first)
            else:
                runs.append((rank, 1, 1))
        return cls(shape=mesh.shape, ranks=tuple(runs))


class ArrayRecord(Record):
    """One stored array.

    ``shape`` is that of the unsharded array; ``splits`` and ``stages`` are the fields of
    :class:`parallel.layout.ShardLayout` under the topology of the save. An array with a ``mesh``
    has ``placements`` on that mesh instead, and no splits: see
    :class:`parallel.placements.MeshLayout`. ``shard_shape`` is the shape of the part in one object,
    ``chunk_shape`` that of a chunk in the object. ``separator`` is between the coordinates in the
    keys of its objects.
    """

    name: Annotated[str, AfterValidator(check_name)]
    shape: tuple[Count, ...]
    logical_dtype: str
    splits: tuple[tuple[str, ...], ...]
    shard_shape: tuple[_Size, ...]
    chunk_shape: tuple[_Size, ...]
    compression: Compression = "none"
    separator: Separator = "."
    stages: tuple[int, ...] = ()
    mesh: MeshRecord | None = None
    placements: tuple[Placement, ...] = ()
    attributes: dict[str, Any] = Field(default_factory=dict)

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
        if self.mesh is not None and (self.stages or any(self.splits)):
            raise ValueError(f"{self.name} has a mesh, and splits or stages besides")
        if self.mesh is None and self.placements:
            raise ValueError(f"{self.name} has placements without a mesh")
        self.layout(ONE_RANK)
        if self.attributes:
            dump(self.attributes)  # raises for NaN and infinities, which JSON lacks
        return self

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored numbers."""
        return np.dtype(STORAGE_DTYPES[self.logical_dtype])

    def layout(self, topology: Topology) -> ShardLayout | MeshLayout:
        """Which rank holds which slice under ``topology``, that of the save."""
        if self.mesh is not None:
            return MeshLayout(self.shape, self.mesh.mesh, self.placements)
        return ShardLayout(self.shape, self.splits, topology, self.stages)

    def object_keys(self) -> Iterator[str]:
        """The key of every object of this array, below its save id."""
        whole = whole_box(self.shape)
        for coordinates in cells(whole, self.shard_shape):
            yield object_key(self, coordinates)


def keys_of_ranks(
    record: ArrayRecord, layout: ShardLayout | MeshLayout, ranks: Iterable[int]
) -> Iterator[str]:
    """The key of every object that any of ``ranks`` holds a part of; keys may repeat."""
    for rank in ranks:
        for box in layout.boxes(rank):
            for coordinates in cells(box, record.shard_shape):
                yield object_key(record, coordinates)


def metadata_objects(arrays: Sequence[ArrayRecord]) -> dict[str, bytes]:
    """Every zarr.json of a save by its key: of the groups, and of the arrays."""
    group = _group_metadata()
    return {
        key: group if record is None else _array_metadata(record)
        for key, record in metadata_keys(arrays).items()
    }


def metadata_keys(arrays: Sequence[ArrayRecord]) -> dict[str, ArrayRecord | None]:
    """The keys of :func:`metadata_objects`, each with its array; None for a group."""
    keys: dict[str, ArrayRecord | None] = {"zarr.json": None}
    for record in arrays:
        keys |= dict.fromkeys(f"{group}/zarr.json" for group in groups_of(record.name))
        keys[f"{record.name}/zarr.json"] = record
    return keys


def _group_metadata() -> bytes:
    return dump({"zarr_format": 3, "node_type": "group", "attributes": {}})


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
    return dump(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": record.shape,
            "data_type": record.dtype.name,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": record.shard_shape},
            },
            "chunk_key_encoding": {
                "name": "default",
                "configuration": {"separator": record.separator},
            },
            "fill_value": False if record.dtype == np.bool_ else 0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": {"logical_dtype": record.logical_dtype, **record.attributes},
        }
    )


def dump(value: object) -> bytes:
    """Compact JSON with sorted keys, so that equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
