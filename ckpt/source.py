"""Where arrays come from: a checkpoint, files of other formats, and changes on the way.

A source is read box by box, so that whatever is made of it can be made in bounded memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from crc32c import crc32c
from pydantic import BaseModel, ConfigDict, ValidationError

from ckpt.format import (
    STORAGE_DTYPES,
    ArrayRecord,
    CheckpointError,
    Compression,
    Manifest,
    encode_manifest,
)
from ckpt.loading import read_box
from ckpt.locations import Location
from ckpt.numbers import FLOATS, convert
from parallel.layout import Box, ShardLayout, Topology

DESCRIPTION = "convoy.json"
"""The file beside arrays in another format that holds what the format has no place for."""


@dataclass(frozen=True)
class SourceArray:
    """One array of a source. ``splits`` is as in ShardLayout: what cut it where it was saved."""

    shape: tuple[int, ...]
    logical_dtype: str
    splits: tuple[tuple[str, ...], ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    compression: Compression = "none"

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored numbers."""
        return np.dtype(STORAGE_DTYPES[self.logical_dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def layout(self, topology: Topology) -> ShardLayout:
        """Who holds which slice under ``topology``; where nothing is known of splits, everybody
        has all of it."""
        return ShardLayout(self.shape, self.splits or ((),) * len(self.shape), topology)


@dataclass(frozen=True)
class SourceInfo:
    """What is known of a source besides its arrays.

    ``identity`` is another for other contents: a save id, or names, lengths and times of files.
    """

    identity: str
    step: int = 0
    topology: Topology = field(default_factory=Topology)
    state: Mapping[str, Any] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    spec_hash: str = ""
    save_id: str | None = None
    """Of a checkpoint."""


class Source(Protocol):
    """Arrays by name. It is pickled to reach other processes, and so holds no open files."""

    @property
    def info(self) -> SourceInfo:
        """What is known besides the arrays."""
        ...

    @property
    def arrays(self) -> Mapping[str, SourceArray]:
        """Every array."""
        ...

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """The numbers of a box, as they are stored; little more than them is read.

        Raises CheckpointError where they are missing or damaged.
        """
        ...


class CheckpointSource:
    """A committed checkpoint; everything read is verified.

    Raises CheckpointError where it has the slices of some ranks alone.
    """

    def __init__(self, root: Location, manifest: Manifest) -> None:
        if manifest.ranks is not None:
            raise CheckpointError(
                f"checkpoint step {manifest.step} has the slices of ranks {list(manifest.ranks)} "
                f"alone: take one that all ranks share"
            )
        self.root, self.manifest = root, manifest
        digest = crc32c(encode_manifest(manifest))
        self.info = SourceInfo(
            identity=f"{manifest.save_id} {digest:08x}",
            step=manifest.step,
            topology=Topology(**manifest.topology),
            state=manifest.state,
            spec=manifest.spec,
            spec_hash=manifest.spec_hash,
            save_id=manifest.save_id,
        )
        self.records = {record.name: record for record in manifest.arrays}
        self.arrays = {name: _of_record(record) for name, record in self.records.items()}

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        return read_box(self.root, self.manifest, self.records[name], box)


def _of_record(record: ArrayRecord) -> SourceArray:
    return SourceArray(
        record.shape, record.logical_dtype, record.splits, record.attributes, record.compression
    )


def changed(info: SourceInfo, how: object) -> SourceInfo:
    """That of a source that differs from another in what ``how`` says."""
    return replace(info, identity=f"{info.identity} {how}")


class Selected:
    """Some arrays of a source, under other names: ``names`` has the source's, by the new one."""

    def __init__(self, source: Source, names: Mapping[str, str]) -> None:
        self.source, self.names = source, dict(names)
        self.info = changed(source.info, sorted(names.items()))
        self.arrays = {new: source.arrays[old] for new, old in names.items()}

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        return self.source.read_box(self.names[name], box)


class Converted:
    """A source with some of its arrays in another float dtype, rounded to nearest, ties to even.

    Args:
        source: the rest of it stays as it is.
        names: of the arrays; those that are no floats of 16 bits or more stay as they are.
        dtype: the logical dtype that they get.
    """

    def __init__(self, source: Source, names: Iterable[str], dtype: str) -> None:
        self.source, self.dtype = source, dtype
        self.names = {n for n in names if source.arrays[n].logical_dtype in FLOATS}
        self.info = changed(source.info, (dtype, sorted(self.names)))
        self.arrays = {
            name: replace(array, logical_dtype=dtype) if name in self.names else array
            for name, array in source.arrays.items()
        }

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        values = self.source.read_box(name, box)
        if name not in self.names:
            return values
        return convert(values, self.source.arrays[name].logical_dtype, self.dtype)


class Described:
    """A source whose ``info`` is another."""

    def __init__(self, source: Source, info: SourceInfo) -> None:
        self.source, self.info, self.arrays = source, info, source.arrays

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        return self.source.read_box(name, box)


class _ArrayNote(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    splits: tuple[tuple[str, ...], ...]
    attributes: dict[str, Any]


class Description(BaseModel):
    """What ``convoy.json`` says of the arrays beside it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal["convoy-arrays"] = "convoy-arrays"
    format_version: Literal[1] = 1
    step: int
    topology: dict[str, int]
    state: dict[str, Any]
    spec: dict[str, Any]
    spec_hash: str
    arrays: dict[str, _ArrayNote]

    @staticmethod
    def of(source: Source, topology: Topology) -> Description:
        """That of a source written for ``topology``."""
        info = source.info
        return Description(
            step=info.step,
            topology=topology.as_dict(),
            state=dict(info.state),
            spec=dict(info.spec),
            spec_hash=info.spec_hash,
            arrays={
                name: _ArrayNote(splits=array.splits, attributes=dict(array.attributes))
                for name, array in source.arrays.items()
            },
        )

    def encode(self) -> bytes:
        """The file's bytes."""
        return (json.dumps(self.model_dump(mode="json"), indent=1, sort_keys=True) + "\n").encode()


def is_described(folder: Path) -> bool:
    """Whether there is a ``convoy.json``."""
    return (folder / DESCRIPTION).is_file()


def described(
    folder: Path, identity: str, arrays: Mapping[str, SourceArray]
) -> tuple[SourceInfo, dict[str, SourceArray]]:
    """What ``convoy.json`` in ``folder`` adds to arrays of another format, where there is one.

    Raises CheckpointError where it cannot be read, or is of other arrays.
    """
    path = folder / DESCRIPTION
    if not is_described(folder):
        return SourceInfo(identity), dict(arrays)
    try:
        found = Description.model_validate_json(path.read_bytes())
        topology = Topology(**found.topology)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValidationError, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{path} is not of this format: {first}; move it away") from None
    if set(found.arrays) != set(arrays):
        name = sorted(set(found.arrays) ^ set(arrays))[0]
        raise CheckpointError(f"{path} is of other arrays: {name} is in one of the two alone")
    info = SourceInfo(
        identity, found.step, topology, found.state, found.spec, found.spec_hash
    )  # fmt: skip
    noted = {}
    for name, array in arrays.items():
        note = found.arrays[name]
        if len(note.splits) not in (0, len(array.shape)):
            raise CheckpointError(f"{path}: splits of {name} are not those of {array.shape}")
        noted[name] = replace(array, splits=note.splits, attributes=note.attributes)
        try:
            noted[name].layout(topology)
        except ValueError:
            raise CheckpointError(f"{path}: splits of {name} are no layout's") from None
    return info, noted
