"""The protocol of everything that yields arrays: checkpoints, files of other formats, changes.

A source is read box by box: whatever is written from a source needs a bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c

from ckpt.errors import CheckpointError
from ckpt.format import (
    STORAGE_DTYPES,
    Compression,
    Manifest,
    MeshRecord,
    PackPlace,
    StoredTensor,
    encode_manifest,
)
from ckpt.read import PackReader, read_tensor
from ckpt.store import Location
from parallel.layout import Box, ShardLayout, Topology
from parallel.placements import MeshLayout, Placement


@dataclass(frozen=True)
class SourceArray:
    """One array of a source. ``splits`` is as in ShardLayout: the axes that cut the array when the
    array was saved. An array with a ``mesh`` had ``placements`` on that mesh instead."""

    shape: tuple[int, ...]
    logical_dtype: str
    splits: tuple[tuple[str, ...], ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    compression: Compression = "none"
    mesh: MeshRecord | None = None
    placements: tuple[Placement, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored numbers."""
        return np.dtype(STORAGE_DTYPES[self.logical_dtype])

    @property
    def nbytes(self) -> int:
        """Bytes of all numbers of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def layout(self, topology: Topology) -> ShardLayout | MeshLayout:
        """Who holds which slice under ``topology``, or on the mesh. Every rank has all of an array
        of which no splits are known."""
        if self.mesh is not None:
            return MeshLayout(self.shape, self.mesh.mesh, self.placements)
        return ShardLayout(self.shape, self.splits or ((),) * len(self.shape), topology)


@dataclass(frozen=True)
class SourceInfo:
    """What is known of a source besides its arrays.

    ``identity`` differs where contents differ: a save id, or names, lengths and times of files.
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
    """Arrays by name. A source is pickled to reach other processes, and holds no open files."""

    @property
    def info(self) -> SourceInfo:
        """What is known besides the arrays."""
        ...

    @property
    def arrays(self) -> Mapping[str, SourceArray]:
        """Every array."""
        ...

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """The numbers of a box as they are stored, bfloat16 and float8 as bit patterns. Little
        more than the box is read.

        Raises CheckpointError where numbers are missing or damaged.
        """
        ...


class CheckpointSource:
    """A committed checkpoint; everything read is verified.

    Raises CheckpointError where the checkpoint has the slices of some ranks only.
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
        self.records = manifest.tensors
        self.arrays = {name: _of_record(record) for name, record in self.records.items()}
        self._read_pack = PackReader(root, manifest)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_read_pack": PackReader(self.root, self.manifest)}

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`Source`."""
        return read_tensor(self.root, self.manifest, self.records[name], box, self._read_pack)


def _of_record(record: StoredTensor) -> SourceArray:
    place = record.pack if isinstance(record, PackPlace) else record  # a pack has the mesh
    return SourceArray(
        record.shape,
        record.logical_dtype,
        () if isinstance(record, PackPlace) else record.splits,
        record.attributes,
        record.compression,
        place.mesh,
        record.placements,
    )


def changed(info: SourceInfo, how: object) -> SourceInfo:
    """The info of a source that was made from another one; ``how`` tells the change."""
    return replace(info, identity=f"{info.identity} {how}")
