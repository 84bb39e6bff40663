"""What torch.save wrote, read without torch and without unpickling it.

A file, or a stretch of one, is a zip archive: a pickle of everything but the numbers of tensors,
and these uncompressed, one member for each storage. The pickle is read as data
(:mod:`ckpt.interop.safe_pickle`), and numbers only where they are asked for.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import CheckpointError, readable
from ckpt.format import STORAGE_DTYPES
from ckpt.interop.plain_array import read_plain
from ckpt.interop.safe_pickle import Inert, admitted, read_pickle
from parallel.layout import Box

STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
_TENSOR_CLASSES = admitted(
    {
        "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
        "torch": tuple(STORAGES),
        "torch.storage": ("UntypedStorage",),
    }
)
_LONGEST_PICKLE = 1 << 20
_LONGEST_TREE = 1 << 28
# Known, to be refused by name.
_OTHER_DTYPES = {
    "uint16", "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "quint8", "qint8", "qint32",
}  # fmt: skip


def plain_class(module: str, name: str) -> str | type | None:
    """A pickled dtype reads as the dtype's name, and an OrderedDict as a dict."""
    if (module, name) in (("collections", "OrderedDict"), ("builtins", "dict")):
        return dict
    return name if module == "torch" and (name in STORAGE_DTYPES or name in _OTHER_DTYPES) else None


class _Table(dict[Any, Any]):
    """An ordered dict: of a module's state dict, with attributes, which are left out."""

    def __new__(cls, *args: Any) -> _Table:
        return dict.__new__(cls)

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        pass


def _tables(module: str, name: str) -> type | None:
    named = module == "collections" and name in ("OrderedDict", "defaultdict")
    return _Table if named else None


class _Anything:
    """Admits every class, as an inert record: nothing is imported or run."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, str], type] = {}

    def __call__(self, module: str, name: str) -> type:
        return self.kinds.setdefault((module, name), type(name, (Inert,), {}))


class StoredNumbers(NamedTuple):
    """The numbers of a tensor in a file."""

    offset: int
    """The byte where they begin."""
    order: tuple[int, ...]
    """The order in which the tensor's dims lie there."""


class TensorInFile(NamedTuple):
    """A tensor whose numbers are still in the file."""

    path: Path
    shape: tuple[int, ...]
    logical_dtype: str
    numbers: StoredNumbers

    def read(self, box: Box) -> np.ndarray[Any, Any]:
        """The numbers of a box, as they are stored."""
        dtype, order = np.dtype(STORAGE_DTYPES[self.logical_dtype]), self.numbers.order
        lying = [self.shape[dim] for dim in order]
        values = read_plain(
            self.path, self.numbers.offset, lying, dtype, tuple(box[d] for d in order)
        )
        return values.transpose([order.index(dim) for dim in range(len(order))])

    def item(self) -> Any:
        """The number of a tensor with one number."""
        values = self.read(tuple((0, size) for size in self.shape)).reshape(-1)
        if self.logical_dtype == "bfloat16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values[0].item()


@contextmanager
def _archive(
    path: Path, offset: int, length: int, where: str, longest: int
) -> Iterator[tuple[_Part, zipfile.ZipFile, dict[str, zipfile.ZipInfo]]]:
    """The archive in a stretch of a file, and its members without the folder before them."""
    with readable(path):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        stretch = _Part(handle, offset, length)
        with zipfile.ZipFile(io.BufferedReader(stretch, 4096)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            pickled = members["data.pkl"]
            if pickled.compress_type != zipfile.ZIP_STORED or pickled.file_size > longest:
                raise CheckpointError(f"{where} is no tensor")
            if "byteorder" in members and archive.read(members["byteorder"])[:6] != b"little":
                raise CheckpointError(f"{where} is not little-endian")
            yield stretch, archive, members
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, KeyError, NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{where} is not as torch.save writes it: {error}") from None
    finally:
        os.close(handle)


def _locate(stretch: _Part, member: zipfile.ZipInfo, needed: int, length: int, where: str) -> int:
    """The byte, within the archive, where a member's bytes begin; ``needed`` of them are there."""
    stretch.seek(member.header_offset)
    header = stretch.read(30)
    begin = member.header_offset + 30 + int.from_bytes(header[26:28], "little")
    begin += int.from_bytes(header[28:30], "little")
    if member.compress_type != zipfile.ZIP_STORED or member.file_size < needed:
        raise CheckpointError(f"{where} has fewer numbers than it says")
    if header[:4] != b"PK\x03\x04" or begin + needed > length:
        raise CheckpointError(f"{where} is not whole")
    return begin


@lru_cache(maxsize=65536)
def find_numbers(
    path: Path, offset: int, length: int, name: str, sizes: tuple[int, ...], logical_dtype: str
) -> StoredNumbers:
    """Where in ``path`` the numbers of a tensor are that was saved by itself: what its archive says
    of itself, checked against what is expected."""
    where = f"{path}: the chunk of {name} at byte {offset}"
    with _archive(path, offset, length, where, _LONGEST_PICKLE) as (stretch, archive, members):
        data = archive.read(members["data.pkl"])
        tensor = _tensor(read_pickle(data, where, _TENSOR_CLASSES, plain_class), where)
        if (tensor.shape, tensor.logical_dtype) != (sizes, logical_dtype):
            raise CheckpointError(
                f"{where} is {tensor.logical_dtype} {tensor.shape}, the metadata says "
                f"{logical_dtype} {sizes}"
            )
        itemsize = np.dtype(STORAGE_DTYPES[logical_dtype]).itemsize
        needed = (tensor.start + math.prod(sizes)) * itemsize
        begin = _locate(stretch, members[f"data/{tensor.key}"], needed, length, where)
    return StoredNumbers(offset + begin + tensor.start * itemsize, tensor.order)


def read_torch_file(path: Path, offset: int = 0, length: int | None = None) -> Any:
    """What torch.save wrote: tables, lists and values, with :class:`TensorInFile` for tensors.

    Objects of other classes are inert records (:class:`ckpt.interop.safe_pickle.Inert`): their
    classes are neither imported nor called.

    Raises CheckpointError, naming the file, for what is no such file or is not whole.
    """
    where = f"{path}: the object at byte {offset}" if offset else str(path)
    with readable(path):
        length = path.stat().st_size - offset if length is None else length
    with _archive(path, offset, length, where, _LONGEST_TREE) as (stretch, archive, members):
        data = archive.read(members["data.pkl"])
        tree = read_pickle(data, where, _TENSOR_CLASSES, _tables, plain_class, _Anything())

        def placed(node: Any) -> Any:
            if isinstance(node, dict):
                return {key: placed(value) for key, value in node.items()}
            if isinstance(node, list | tuple) and not hasattr(node, "_fields"):
                return type(node)(placed(value) for value in node)
            if not isinstance(node, Inert):
                return node
            kind = type(node).__name__
            if kind == "_rebuild_parameter":
                return placed(node.args[0])
            if kind == "Size":
                return tuple(node.args[0])
            if not kind.startswith("_rebuild_tensor_v"):
                node.state = placed(node.state)
                return node
            tensor = _tensor(node, where)
            dtype = STORAGE_DTYPES.get(tensor.logical_dtype)
            if dtype is None:
                raise CheckpointError(f"{where} has a tensor of dtype {tensor.logical_dtype}")
            itemsize = np.dtype(dtype).itemsize
            needed = (tensor.start + math.prod(tensor.shape)) * itemsize
            begin = _locate(stretch, members[f"data/{tensor.key}"], needed, length, where)
            numbers = StoredNumbers(offset + begin + tensor.start * itemsize, tensor.order)
            return TensorInFile(path, tensor.shape, tensor.logical_dtype, numbers)

        return placed(tree)


class _Tensor(NamedTuple):
    key: str
    """Of the storage."""
    start: int
    """The first element in the storage."""
    shape: tuple[int, ...]
    logical_dtype: str
    order: tuple[int, ...]


def _tensor(record: Any, where: str) -> _Tensor:
    """What the record of a tensor says. Raises CheckpointError for other records, and for tensors
    whose numbers do not lie end to end."""
    if isinstance(record, Inert) and type(record).__name__ == "_rebuild_parameter":
        record = record.args[0]
    if not isinstance(record, Inert) or not type(record).__name__.startswith("_rebuild_tensor_v"):
        raise CheckpointError(f"{where} is no tensor")
    try:
        (_, kind, key, _, _), start, shape, strides, *rest = record.args
        dtype = STORAGES.get(kind.__name__, rest[2] if len(rest) > 2 else None)
        sizes, strides = tuple(map(int, shape)), tuple(map(int, strides))
        start = int(start)
        if start < 0 or len(sizes) != len(strides) or any(size < 0 for size in sizes):
            raise ValueError
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{where} is no tensor") from None
    # Dims of one index have any stride. Those of the others must leave no holes.
    order = tuple(sorted(range(len(sizes)), key=lambda d: (sizes[d] > 1, -strides[d], d)))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] > 1 and all(sizes) and strides[dim] != expected:
            raise CheckpointError(f"{where} has strides {strides}: it is not contiguous")
        expected *= max(sizes[dim], 1)
    return _Tensor(str(key), start, sizes, str(dtype), order)


class _Part(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, handle: int, offset: int, length: int) -> None:
        self.handle, self.offset, self.length, self.at = handle, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        self.at = max(0, base + offset)
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self.length - self.at)]
        count = os.preadv(self.handle, [view], self.offset + self.at) if view else 0
        self.at += count
        return count
