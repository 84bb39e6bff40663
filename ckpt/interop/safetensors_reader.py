"""Arrays of safetensors files: one file, or a folder with ``model.safetensors.index.json``.

A file is a length (uint64, little-endian), a JSON header of dtypes, shapes and offsets, and the
arrays end to end (huggingface.co/docs/safetensors). The format has no checksums: what is read is
only as good as the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import CheckpointError, readable
from ckpt.format import STORAGE_DTYPES
from ckpt.interop.plain_array import read_plain
from ckpt.rewrite import SourceArray, described, is_described
from parallel.layout import Box

SAFETENSORS_INDEX = "model.safetensors.index.json"
SAFETENSORS_SINGLE = "model.safetensors"
SAFETENSORS_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""A header's names of dtypes."""
_LONGEST_HEADER = 100_000_000  # as the library has it


class _Place(NamedTuple):
    path: Path
    offset: int


class SafetensorsSource:
    """A :class:`ckpt.rewrite.Source` of a file or a folder.

    Raises CheckpointError, naming the file, for headers that are not right, arrays that are in two
    files or in none, dtypes that have no place in a checkpoint, and files that end too soon.
    """

    def __init__(self, path: Path) -> None:
        found: dict[str, SourceArray] = {}
        self.places: dict[str, _Place] = {}
        seen = hashlib.sha256()
        for file in _files(path):
            header, data, stamp = _read_header(file)
            seen.update(stamp)
            for name, entry in header.items():
                if name in found:
                    raise CheckpointError(f"{file}: {name} must be in one file, and is in another")
                array, begin = _array(file, name, entry)
                found[name], self.places[name] = array, _Place(file, data + begin)
        if path.is_dir() and (path / SAFETENSORS_INDEX).is_file():
            _check_index(path, self.places)
        folder = path if path.is_dir() else path.parent
        self.info, self.arrays = described(folder, f"safetensors-{seen.hexdigest()[:16]}", found)
        self.described = is_described(folder)

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        array, place = self.arrays[name], self.places[name]
        return read_plain(place.path, place.offset, array.shape, array.dtype, box)


def is_safetensors(path: Path) -> bool:
    """Whether this looks like what :class:`SafetensorsSource` reads."""
    if path.is_dir():
        return (path / SAFETENSORS_INDEX).is_file() or any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors"


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / SAFETENSORS_INDEX).is_file():
        return [path / file for file in sorted(set(_weight_map(path).values()))]
    files = sorted(path.glob("*.safetensors"))
    if len(files) > 1 and path / SAFETENSORS_SINGLE not in files:
        raise CheckpointError(
            f"{path} has {len(files)} safetensors files and no {SAFETENSORS_INDEX}: name one"
        )
    if not files:
        raise CheckpointError(f"{path} has no safetensors files")
    return [path / SAFETENSORS_SINGLE] if path / SAFETENSORS_SINGLE in files else files


def _weight_map(folder: Path) -> dict[str, str]:
    path = folder / SAFETENSORS_INDEX
    with readable(path):
        data = path.read_bytes()
    try:
        found = json.loads(data)["weight_map"]
        names = {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} must be JSON with a weight_map") from None
    for file in names.values():
        if Path(file).name != file:
            raise CheckpointError(f"{path}: file ({file}) must be in the same folder")
    return names


def _check_index(folder: Path, places: dict[str, _Place]) -> None:
    listed = _weight_map(folder)
    for name, file in listed.items():
        if name not in places or places[name].path.name != file:
            raise CheckpointError(
                f"{folder / file}: {name} is missing; {SAFETENSORS_INDEX} lists it"
            )
    stray = sorted(set(places) - set(listed))
    if stray:
        raise CheckpointError(f"{places[stray[0]].path}: {stray[0]} is not in {SAFETENSORS_INDEX}")


def _read_header(path: Path) -> tuple[dict[str, Any], int, bytes]:
    """The header without ``__metadata__``, where its data begin, and what tells its contents."""
    with readable(path), path.open("rb") as file:
        status = os.fstat(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        if status.st_size < 8 or length > min(_LONGEST_HEADER, status.st_size - 8):
            raise CheckpointError(f"{path} is no whole safetensors file: its header is too long")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_no_twins)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no whole safetensors file: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is no whole safetensors file: its header is no table")
    header.pop("__metadata__", None)
    _check_offsets(path, header, status.st_size - 8 - length)
    stamp = f"{path.resolve()} {status.st_size} {status.st_mtime_ns} ".encode() + text
    return header, 8 + length, stamp


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name is in its header twice")
    return table


def _check_offsets(path: Path, header: dict[str, Any], data_bytes: int) -> None:
    """Arrays lie end to end, and fill the file."""
    try:
        ends = sorted(
            (int(e["data_offsets"][0]), int(e["data_offsets"][1])) for e in header.values()
        )
    except (KeyError, TypeError, ValueError, IndexError):
        raise CheckpointError(f"{path} is no whole safetensors file: it lacks offsets") from None
    at = 0
    for begin, end in ends:
        if begin != at or end < begin:
            raise CheckpointError(f"{path} is no whole safetensors file: its offsets have holes")
        at = end
    if at != data_bytes:
        raise CheckpointError(
            f"{path} is no whole safetensors file: it has {data_bytes} bytes of arrays, its header "
            f"says {at}"
        )


def _array(path: Path, name: str, entry: dict[str, Any]) -> tuple[SourceArray, int]:
    kind, shape = entry.get("dtype"), entry.get("shape")
    if kind not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{path}: {name} has dtype {kind}; one of {', '.join(SAFETENSORS_DTYPES)} can be read"
        )
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise CheckpointError(f"{path}: {name} has no shape")
    begin, end = map(int, entry["data_offsets"])
    nbytes = math.prod(shape) * np.dtype(STORAGE_DTYPES[SAFETENSORS_DTYPES[kind]]).itemsize
    if nbytes != end - begin:
        raise CheckpointError(f"{path}: {name} has {end - begin} bytes, its shape needs {nbytes}")
    return SourceArray(tuple(shape), SAFETENSORS_DTYPES[kind]), begin
