"""Arrays that are cut over safetensors files: what torch.distributed.checkpoint's
HuggingFaceStorageWriter saves on many ranks.

Each file has a piece of each array, and in its header, as JSON under ``__metadata__``, where the
piece lies in the array. A file without that has whole arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import CheckpointError, readable
from ckpt.interop.safetensors_reader import SafetensorsSource
from ckpt.rewrite import SourceArray, described
from parallel.layout import Box, box_shape, intersect, within

_OFFSETS = "DCP_SHARDING_INFO"


class _Piece(NamedTuple):
    box: Box
    source: SafetensorsSource


class ShardedSafetensorsSource:
    """A :class:`ckpt.rewrite.Source` of all safetensors files of a folder.

    Raises CheckpointError, naming the file, as SafetensorsSource does, and for pieces that do not
    make up an array.
    """

    def __init__(self, folder: Path) -> None:
        self.pieces: dict[str, list[_Piece]] = {}
        dtypes: dict[str, set[str]] = {}
        stamp = hashlib.sha256()
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder} has no safetensors files")
        for file in files:
            source, offsets = SafetensorsSource(file), _offsets(file)
            stamp.update(source.info.identity.encode())
            for name, array in source.arrays.items():
                start = offsets.get(name) or [0] * len(array.shape)
                if len(start) != len(array.shape):
                    raise CheckpointError(
                        f"{file}: the offsets of {name} are not those of its dims"
                    )
                box = tuple((o, o + size) for o, size in zip(start, array.shape, strict=True))
                self.pieces.setdefault(name, []).append(_Piece(box, source))
                dtypes.setdefault(name, set()).add(array.logical_dtype)
        arrays = {}
        for name, pieces in self.pieces.items():
            boxes = [piece.box for piece in pieces]
            shape = tuple(max(stop for _, stop in dim) for dim in zip(*boxes, strict=True))
            volume = sum(math.prod(box_shape(piece.box)) for piece in pieces)
            lie_over = any(
                intersect(a, b) is not None for i, a in enumerate(boxes) for b in boxes[:i]
            )
            if volume != math.prod(shape) or lie_over or len(dtypes[name]) > 1:
                raise CheckpointError(
                    f"{folder}: the pieces of {name} do not make up one array of shape {shape}"
                )
            arrays[name] = SourceArray(shape, next(iter(dtypes[name])))
        self.info, self.arrays = described(folder, f"safetensors-{stamp.hexdigest()[:16]}", arrays)

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        out = np.empty(box_shape(box), self.arrays[name].dtype)
        for piece in self.pieces[name]:
            common = intersect(piece.box, box)
            if common is not None:
                inner = tuple((cut.start, cut.stop) for cut in within(common, piece.box))
                out[within(common, box)] = piece.source.read_box(name, inner)
        return out


def _offsets(file: Path) -> dict[str, list[int]]:
    """Where the pieces of a file begin in their arrays, by name."""
    with readable(file), file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        text = opened.read(length)
    try:
        noted = json.loads(text).get("__metadata__", {}).get(_OFFSETS)
        noted = json.loads(noted) if noted else {}
        return {
            name: [int(offset) for offset in entry["saved_offsets"]]
            for name, entry in noted.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"{file}: its header must say where each piece lies") from None
