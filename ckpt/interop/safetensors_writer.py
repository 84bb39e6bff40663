"""Writing safetensors files: one, or some and ``model.safetensors.index.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpt.interop.safetensors_reader import (
    SAFETENSORS_DTYPES,
    SAFETENSORS_INDEX,
    SAFETENSORS_SINGLE,
)
from ckpt.rewrite import (
    Checked,
    FolderTarget,
    Part,
    Receipt,
    Source,
    row_major_boxes,
    split_into_files,
)
from parallel.layout import Topology

FILE_BYTES = 5 * 10**9
"""A file has at most so many bytes of arrays, or one array."""
_NAMES = {logical: name for name, logical in SAFETENSORS_DTYPES.items()}


class SafetensorsTarget(FolderTarget):
    """A :class:`ckpt.rewrite.Target`: a folder of safetensors files; each file is a part.

    The files have the arrays in the order of the source. ``beside`` is as in FolderTarget.
    """

    def __init__(
        self,
        source: Source,
        folder: Path,
        topology: Topology,
        file_bytes: int = FILE_BYTES,
        beside: Mapping[str, bytes] | None = None,
    ) -> None:
        super().__init__(source, folder, topology, f"safetensors {file_bytes}", beside)
        sizes = ((name, array.nbytes) for name, array in source.arrays.items())
        files = split_into_files(sizes, file_bytes)
        count = len(files)
        self.files = {
            SAFETENSORS_SINGLE if count == 1 else f"model-{i:05d}-of-{count:05d}.safetensors": names
            for i, names in enumerate(files, 1)
        }

    def parts(self) -> Sequence[Part]:
        """See :class:`ckpt.rewrite.Target`."""
        arrays = self.source.arrays
        return [
            Part(file, len(self._header(names)) + sum(arrays[name].nbytes for name in names))
            for file, names in self.files.items()
        ]

    def _header(self, names: list[str]) -> bytes:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            array = self.source.arrays[name]
            header[name] = {
                "dtype": _NAMES[array.logical_dtype],
                "shape": list(array.shape),
                "data_offsets": [at, at + array.nbytes],
            }
            at += array.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # arrays are aligned
        return len(text).to_bytes(8, "little") + text

    def fill(self, file: Checked, key: str, slab_bytes: int) -> dict[str, Any]:
        """See :class:`ckpt.rewrite.FolderTarget`."""
        file.write(self._header(self.files[key]))
        for name in self.files[key]:
            array = self.source.arrays[name]
            for box in row_major_boxes(array.shape, array.dtype.itemsize, slab_bytes):
                file.write(self.source.read_box(name, box).reshape(-1).view("u1"))
        return {}

    def finish(self, receipts: dict[str, Receipt]) -> None:
        """See :class:`ckpt.rewrite.FolderTarget`."""
        if len(self.files) > 1:
            total = sum(array.nbytes for array in self.source.arrays.values())
            weight_map = {name: file for file, names in self.files.items() for name in names}
            index = {
                "metadata": {"total_size": total},
                "weight_map": dict(sorted(weight_map.items())),
            }
            self.put(SAFETENSORS_INDEX, (json.dumps(index, indent=2) + "\n").encode())
