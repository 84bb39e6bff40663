"""The lengths and checksums of a manifest's objects, in columns: a million decode in a second."""

from __future__ import annotations

import builtins
import re
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby, product
from operator import ge
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import numpy as np
from crc32c import crc32c
from pydantic import BaseModel, ConfigDict, Field

from parallel.placements import flat_index

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Checksum = Annotated[int, Field(ge=0, lt=1 << 32)]


Separator = Literal["."]
"""What keys have between coordinates. With dots the objects of an array lie in one folder; with
zarr's other separator, a slash, each coordinate but the last would be a folder of its own, which a
file system makes and syncs one by one."""
_KEY = re.compile(r"(.+)/c((?:\.[0-9]{1,19})*)", re.DOTALL)


class Record(BaseModel):
    """JSON of a manifest, of a description, or of a message: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Gridded(Protocol):
    """An array's fields that determine the keys of its objects."""

    @property
    def name(self) -> str:
        """Its key below the save id."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the unsharded array."""

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The shape of the part in one object."""

    @property
    def separator(self) -> Separator:
        """Between the coordinates in the keys."""


class ObjectRecord(NamedTuple):
    """One stored file: its length in bytes and a checksum.

    The checksum is the file's CRC32C; of a shard it is the CRC32C of its chunks' CRC32Cs, in the
    order of its index. (The CRC of bytes that are followed by their own CRC is a constant: that of
    a shard's whole file would be the same whatever is in it.)
    """

    bytes: _Count
    checksum: _Checksum

    @classmethod
    def of(cls, data: builtins.bytes) -> ObjectRecord:
        """The record of a file that is no shard, with these bytes."""
        return cls(bytes=len(data), checksum=crc32c(data))


class Stored(Record):
    """The objects of one array in a store, in row-major order of the grid."""

    lengths: list[tuple[_Count, _Count]]
    """Run-length encoded: pairs of a number of objects, and the bytes of each of them."""
    checksums: list[_Checksum]

    @classmethod
    def of(cls, objects: Sequence[ObjectRecord]) -> Stored:
        """The columns of a sequence of records."""
        runs = groupby(record.bytes for record in objects)
        lengths = [(sum(1 for _ in run), length) for length, run in runs]
        return cls(lengths=lengths, checksums=[record.checksum for record in objects])

    @property
    def total_bytes(self) -> int:
        """The sum of all lengths."""
        return sum(count * length for count, length in self.lengths)

    @property
    def is_even(self) -> bool:
        """Whether there are as many lengths as checksums."""
        return sum(count for count, _ in self.lengths) == len(self.checksums)


def object_key(array: Gridded, coordinates: tuple[int, ...]) -> str:
    """zarr's default chunk key: ``NAME/c.0.1``."""
    return f"{array.name}/{array.separator.join(('c', *map(str, coordinates)))}"


def grid_of(record: Gridded) -> tuple[int, ...]:
    """How many objects an array has along each dim."""
    sizes = zip(record.shape, record.shard_shape, strict=True)
    return tuple(-(-size // shard) for size, shard in sizes)


Coordinates = Callable[[Any], Sequence[tuple[int, ...]] | None]
"""The grid coordinates of an array's objects in a store, in row-major order; None for all."""


def _keys(record: Gridded, coordinates: Sequence[tuple[int, ...]] | None) -> Iterator[str]:
    if coordinates is not None:
        return (object_key(record, at) for at in coordinates)
    grid = grid_of(record)
    if not grid:
        return iter([object_key(record, ())])
    # A string for each index of a dim, not for each object.
    names = (
        [[f"{record.separator}{index}" for index in range(size)] for size in grid]
        if all(grid)
        else [[]]
    )
    return map("".join, product([f"{record.name}/c"], *names))


class Gathered(NamedTuple):
    """The objects of a save in a manifest's order, and the keys that are missing or unexpected."""

    metadata: dict[str, ObjectRecord]
    stored: list[Stored]
    missing: list[str]
    stray: list[str]


def gather(
    arrays: Sequence[Gridded],
    metadata: Sequence[str],
    coordinates: Coordinates,
    found: Mapping[str, ObjectRecord],
) -> Gathered:
    """Put the ``found`` objects, by key, into a manifest's order."""
    missing = [key for key in metadata if key not in found]
    here = {key: found[key] for key in metadata if key in found}
    count, stored = len(here), []
    for record in arrays:
        keys = list(_keys(record, coordinates(record)))
        records = [found[key] for key in keys if key in found]
        if len(records) < len(keys):
            missing += [key for key in keys if key not in found]
        count += len(records)
        stored.append(Stored.of(records))
    stray: list[str] = []
    if count < len(found):
        known = {*metadata, *chain.from_iterable(_keys(r, coordinates(r)) for r in arrays)}
        stray = sorted(found.keys() - known)
    return Gathered(here, stored, sorted(missing), stray)


class Objects(Mapping[str, ObjectRecord]):
    """Every object of a manifest by its key below the save id; keys are computed on demand."""

    def __init__(
        self,
        arrays: Sequence[Gridded],
        metadata: Mapping[str, ObjectRecord],
        stored: Sequence[Stored],
        coordinates: Coordinates,
    ) -> None:
        self._metadata, self._coordinates = metadata, coordinates
        self._columns = {
            record.name: _Column(record, here, coordinates)
            for record, here in zip(arrays, stored, strict=True)
        }

    def __getitem__(self, key: str) -> ObjectRecord:
        if key in self._metadata:
            return self._metadata[key]
        match = _KEY.fullmatch(key)
        column = None if match is None else self._columns.get(match[1])
        if match is not None and column is not None:
            at = tuple(map(int, re.findall("[0-9]+", match[2])))  # a scalar's key has none
            index = column.index(at)
            if index is not None and object_key(column.record, at) == key:
                return column.record_at(index)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        yield from self._metadata
        for column in self._columns.values():
            yield from _keys(column.record, self._coordinates(column.record))

    def items(self) -> ItemsView[str, ObjectRecord]:
        """All keys and records, faster than by look-ups of each key."""
        return _Items(self)

    def pairs(self) -> Iterator[tuple[str, ObjectRecord]]:
        """All keys and records: metadata first, then each array's objects in row-major order."""
        yield from self._metadata.items()
        for column in self._columns.values():
            keys = _keys(column.record, self._coordinates(column.record))
            yield from zip(keys, column.records(), strict=True)

    def __len__(self) -> int:
        columns = self._columns.values()
        return len(self._metadata) + sum(len(column.stored.checksums) for column in columns)

    def __repr__(self) -> str:
        return f"<{len(self)} objects>"


class _Items(ItemsView[str, ObjectRecord]):
    def __init__(self, objects: Objects) -> None:
        super().__init__(objects)
        self._objects = objects

    def __iter__(self) -> Iterator[tuple[str, ObjectRecord]]:
        return self._objects.pairs()


class _Column:
    """The objects of one array."""

    def __init__(self, record: Gridded, stored: Stored, coordinates: Coordinates) -> None:
        self.record, self.stored, self._coordinates = record, stored, coordinates
        self.grid = grid_of(record)

    @cached_property
    def _places(self) -> dict[tuple[int, ...], int] | None:
        found = self._coordinates(self.record)
        return None if found is None else {at: index for index, at in enumerate(found)}

    @cached_property
    def _lengths(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        counts = [count for count, _ in self.stored.lengths]
        return np.repeat(np.array([n for _, n in self.stored.lengths], np.int64), counts)

    def index(self, at: tuple[int, ...]) -> int | None:
        """The index of the object at some coordinates; None where the store lacks that object."""
        if self._places is not None:
            return self._places.get(at)
        if len(at) != len(self.grid) or any(map(ge, at, self.grid)):
            return None
        return flat_index(at, self.grid)

    def records(self) -> Iterator[ObjectRecord]:
        """The records in order."""
        return map(ObjectRecord, self._lengths.tolist(), self.stored.checksums)

    def record_at(self, index: int) -> ObjectRecord:
        """The record at an index."""
        return ObjectRecord(int(self._lengths[index]), self.stored.checksums[index])
