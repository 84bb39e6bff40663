"""Writing a folder that torch.distributed.checkpoint loads."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt.interop.dcp_reader import METADATA
from ckpt.rewrite import (
    Checked,
    FolderTarget,
    Part,
    Receipt,
    Source,
    row_major_boxes,
    split_into_files,
)
from parallel.layout import Box, Topology, box_shape, whole_box

CHUNK_BYTES = 8 << 20
"""The most that a chunk has: torch.save writes, and torch.load reads, a whole one."""
FILE_BYTES = 512 << 20


class _Chunk(NamedTuple):
    name: str
    box: Box


class DcpTarget(FolderTarget):
    """A :class:`ckpt.rewrite.Target`: a folder with ``.metadata``; each ``.distcp`` file is a part.

    ``torch.distributed.checkpoint.load({name: tensor})`` fills tensors, DTensors among them, by
    the arrays' own names.
    """

    def __init__(self, source: Source, folder: Path, topology: Topology) -> None:
        super().__init__(source, folder, topology, f"dcp {CHUNK_BYTES} {FILE_BYTES}")
        sizes = (
            (_Chunk(name, box), _elements(box) * array.dtype.itemsize)
            for name, array in sorted(source.arrays.items())
            for box in _chunk_boxes(array.shape, array.dtype.itemsize)
        )
        files = split_into_files(sizes, FILE_BYTES)
        self.files = {f"__0_{i}.distcp": chunks for i, chunks in enumerate(files)}

    def parts(self) -> Sequence[Part]:
        """See :class:`ckpt.rewrite.Target`; the archives' own bytes are not counted."""
        arrays = self.source.arrays
        return [
            Part(
                file,
                sum(_elements(box) * arrays[name].dtype.itemsize for name, box in chunks),
            )
            for file, chunks in self.files.items()
        ]

    def fill(self, file: Checked, key: str, slab_bytes: int) -> dict[str, Any]:
        """See :class:`ckpt.rewrite.FolderTarget`."""
        spans = []
        for name, box in self.files[key]:
            dtype = getattr(torch, self.source.arrays[name].logical_dtype)
            values = torch.from_numpy(self.source.read_box(name, box))
            begin = file.nbytes
            torch.save(values.view(dtype), cast(IO[bytes], file))
            spans.append([begin, file.nbytes - begin])
        return {"spans": spans}

    def finish(self, receipts: dict[str, Receipt]) -> None:
        """See :class:`ckpt.rewrite.FolderTarget`."""
        chunks: dict[str, list[ChunkStorageMetadata]] = {name: [] for name in self.source.arrays}
        places = {}
        for file, members in self.files.items():
            for (name, box), (begin, length) in zip(members, receipts[file]["spans"], strict=True):
                offsets = torch.Size([start for start, _ in box])
                index = MetadataIndex(name, offsets, len(chunks[name]))
                places[index] = _StorageInfo(file, begin, length)
                sizes = torch.Size(box_shape(box))
                chunks[name].append(ChunkStorageMetadata(offsets, sizes))
        tensors: dict[str, STORAGE_TYPES] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, array.logical_dtype)),
                torch.Size(array.shape),
                chunks[name],
            )
            for name, array in self.source.arrays.items()
        }
        metadata = Metadata(
            tensors,
            planner_data={name: (name,) for name in tensors},
            storage_data=places,
            storage_meta=StorageMeta(save_id=self.source.info.identity),
            version=CURRENT_DCP_VERSION,
        )
        self.put(METADATA, pickle.dumps(metadata))


def _chunk_boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    boxes = list(row_major_boxes(shape, itemsize, CHUNK_BYTES))
    # An array without elements has one chunk all the same: it has a shape to be checked.
    yield from boxes or [whole_box(shape)]


def _elements(box: Box) -> int:
    return math.prod(box_shape(box))
