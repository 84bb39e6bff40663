"""Megatron's indexed datasets: NAME.bin with token ids, NAME.idx with the documents.

The index, little-endian (Megatron-LM, megatron/core/datasets/indexed_dataset.py, ``_IndexWriter``):
9 bytes ``MMIDIDX\\0\\0``, uint64 version 1, uint8 code of the dtype, uint64 sequences n, uint64
document indices d, int32[n] tokens of each sequence, int64[n] byte offsets, int64[d] the first
sequence of each document and, last, n.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from corpus.documents.unit import FileRef, Unit
from corpus.errors import InputError

_MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<9sQBQQ")
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_UNIT_TOKENS = 1 << 23


def is_megatron_index(path: Path) -> bool:
    """Whether a file begins as an index does; False where there is none."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


class MegatronIndex:
    """The documents of one dataset.

    Args:
        path: of the .bin.

    Raises InputError where the two files do not belong together, or are cut off.
    """

    def __init__(self, path: Path) -> None:
        raw = path.with_suffix(".idx").read_bytes()
        if len(raw) < _HEAD.size:
            raise InputError(f"data.source: {path.with_suffix('.idx')} is cut off")
        _, version, code, sequences, documents = _HEAD.unpack_from(raw)
        if version != 1 or code not in _DTYPES:
            raise InputError(
                f"data.source: {path.with_suffix('.idx')} must be of version 1 with integer "
                f"tokens; it has version {version} and dtype code {code}"
            )
        self.dtype = np.dtype(_DTYPES[code])
        wanted = _HEAD.size + 12 * sequences + 8 * documents
        if len(raw) < wanted:
            raise InputError(
                f"data.source: {path.with_suffix('.idx')} has {len(raw)} bytes, its header says "
                f"{wanted}"
            )
        at = _HEAD.size
        sizes = np.frombuffer(raw, "<i4", sequences, at).astype(np.int64)
        firsts = np.frombuffer(raw, "<i8", documents, at + 12 * sequences)
        tokens = np.concatenate([[0], np.cumsum(sizes)])
        self.starts: np.ndarray = tokens[firsts]
        """The first token of each document, and the tokens of all."""
        expected, found = int(tokens[-1]) * self.dtype.itemsize, path.stat().st_size
        if found != expected:
            raise InputError(f"data.source: {path} has {found} bytes, its index says {expected}")


def megatron_units(file: FileRef) -> Iterator[Unit]:
    """Ranges of documents of about equal tokens."""
    starts = MegatronIndex(Path(file.path)).starts
    at, last = 0, len(starts) - 1
    while at < last:
        stop = int(np.searchsorted(starts, starts[at] + _UNIT_TOKENS, side="right"))
        stop = min(max(stop, at + 1), last)
        yield Unit("megatron", (file,), at, stop, at, stop - at)
        at = stop


def megatron_documents(unit: Unit) -> Iterator[tuple[str, np.ndarray]]:
    """The name and the token ids of each document of a unit."""
    file = unit.files[0]
    index = MegatronIndex(Path(file.path))
    tokens = np.memmap(file.path, dtype=index.dtype, mode="r")
    for number in range(unit.start, unit.stop):
        ids = tokens[index.starts[number] : index.starts[number + 1]]
        yield f"{file.name}#{number + 1}", ids
