"""Writing a folder that torch.distributed.checkpoint loads."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
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
_OBJECTS = "__1_0.distcp"


class _Chunk(NamedTuple):
    name: str
    box: Box


class DcpTarget(FolderTarget):
    """A :class:`ckpt.rewrite.Target`: a folder with ``.metadata``; each ``.distcp`` file is a part.

    ``torch.distributed.checkpoint.load({name: tensor})`` fills tensors, DTensors among them, by
    the arrays' own names.

    Args:
        source, folder, topology: as in FolderTarget.
        objects: values that are no tensors, by name; they fit in memory.
        beside: as in FolderTarget.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        topology: Topology,
        objects: Mapping[str, Any] | None = None,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        self.objects = dict(sorted((objects or {}).items()))
        options = f"dcp {CHUNK_BYTES} {FILE_BYTES}"
        if self.objects:
            options += f" {self.objects}"
        super().__init__(source, folder, topology, options, beside)
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
        saved, spans = _saved(self.objects)
        for name, (begin, length) in spans.items():
            places[MetadataIndex(name)] = _StorageInfo(_OBJECTS, begin, length)
        if spans:
            self.put(_OBJECTS, saved)
        tensors: dict[str, STORAGE_TYPES] = {
            name: TensorStorageMetadata(
                TensorProperties(dtype=getattr(torch, array.logical_dtype)),
                torch.Size(array.shape),
                chunks[name],
            )
            for name, array in self.source.arrays.items()
        }
        tensors |= {name: BytesStorageMetadata() for name in self.objects}
        metadata = Metadata(
            tensors,
            planner_data={name: (name,) for name in tensors},
            storage_data=places,
            storage_meta=StorageMeta(save_id=self.source.info.identity),
            version=CURRENT_DCP_VERSION,
        )
        self.put(METADATA, pickle.dumps(metadata))


def _saved(objects: Mapping[str, Any]) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """Objects end to end as torch.save writes each, and where each begins and how long it is."""
    out, spans = io.BytesIO(), {}
    for name, value in objects.items():
        begin = out.tell()
        made = io.BytesIO()
        torch.save(value, made)
        out.write(made.getvalue())
        spans[name] = begin, out.tell() - begin
    return out.getvalue(), spans


def _chunk_boxes(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    boxes = list(row_major_boxes(shape, itemsize, CHUNK_BYTES))
    # An array without elements has one chunk all the same: it has a shape to be checked.
    yield from boxes or [whole_box(shape)]


def _elements(box: Box) -> int:
    return math.prod(box_shape(box))
