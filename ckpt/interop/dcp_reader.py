"""Arrays of a torch.distributed.checkpoint folder, read without torch and without unpickling it.

``.metadata`` is a pickle of where every chunk of every tensor is. A ``.distcp`` file is chunks end
to end. Each chunk is a zip archive as torch.save writes it: a small pickle of shape and strides,
and the numbers uncompressed. :mod:`ckpt.interop.safe_pickle` reads both pickles, and of the numbers
only what is asked for is read. A chunk's offsets and sizes are those of its box in the whole
tensor: how placements (``_StridedShard`` among them) had cut the tensor does not matter.

The format has no checksums of the numbers: what is read is only as good as the disk.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import CheckpointError, readable
from ckpt.format import STORAGE_DTYPES
from ckpt.interop.plain_array import read_plain
from ckpt.interop.safe_pickle import Inert, admitted, read_pickle
from ckpt.rewrite import SourceArray, described, is_described
from parallel.layout import Box, box_shape, intersect, whole_box, within

METADATA = ".metadata"
_STORED = "torch.distributed.checkpoint"
_METADATA_CLASSES = admitted(
    {
        f"{_STORED}.metadata": (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        ),
        # where older versions had them
        "torch.distributed._shard.sharded_tensor.metadata": (
            "TensorProperties", "MEM_FORMAT_ENCODING",
        ),
        f"{_STORED}.filesystem": ("_StorageInfo", "_StoragePrefix"),
        # megatron-core keeps the plans of a save, and up to 0.15 notes of its own
        "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
        f"{_STORED}.planner": (
            "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData",
        ),
        "torch": ("Size", "device"),
        "torch.serialization": ("_get_layout",),
        "pathlib": ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"),
    }
)  # fmt: skip
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32",
    "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
_TENSOR_CLASSES = admitted(
    {
        "torch._utils": ("_rebuild_tensor_v2", "_rebuild_tensor_v3"),
        "torch": tuple(_STORAGES),
        "torch.storage": ("UntypedStorage",),
    }
)
_LONGEST_PICKLE = 1 << 20


def _plain(module: str, name: str) -> str | type | None:
    """A pickled dtype reads as the dtype's name, and an OrderedDict as a dict."""
    if (module, name) == ("collections", "OrderedDict"):
        return dict
    return name if module == "torch" and (name in STORAGE_DTYPES or name in _OTHER_DTYPES) else None


# Known, to be refused by name.
_OTHER_DTYPES = {
    "uint16", "uint32", "uint64", "complex32", "complex64", "complex128", "float8_e4m3fnuz",
    "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "quint8", "qint8", "qint32",
}  # fmt: skip


class _Chunk(NamedTuple):
    box: Box
    path: Path
    offset: int
    length: int


class _Plain(NamedTuple):
    """The numbers of a chunk in a file: the byte where the numbers begin, and the order in which
    the chunk's dims lie there."""

    offset: int
    order: tuple[int, ...]


class DcpSource:
    """A :class:`ckpt.rewrite.Source` of a torch.distributed.checkpoint folder.

    ``left_out`` names what is no tensor (learning rates, counts, lists): pickles, which are not
    read. Raises CheckpointError, naming the file, for metadata that names anything unexpected,
    chunks that do not make up their tensor, and dtypes that have no place in a checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / METADATA
        with readable(path):
            data = path.read_bytes()
        try:
            tensors, places, self.left_out = _entries(read_pickle(
                data, str(path), _METADATA_CLASSES, _plain
            ))  # fmt: skip
            self.chunks = {
                name: [_place(folder, name, box, places) for box in boxes]
                for name, (_, boxes) in tensors.items()
            }
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise CheckpointError(f"{path} is not of a version that is known: {error!r}") from None
        found = {name: array for name, (array, _) in tensors.items()}
        for name, array in found.items():
            if array.logical_dtype not in STORAGE_DTYPES:
                raise CheckpointError(
                    f"{path}: {name} has dtype {array.logical_dtype}; one of "
                    f"{', '.join(STORAGE_DTYPES)} can be read"
                )
            _check_tiling(path, name, array.shape, [chunk.box for chunk in self.chunks[name]])
        stamp = hashlib.sha256(data)
        for file in sorted({chunk.path for chunks in self.chunks.values() for chunk in chunks}):
            with readable(file):
                status = file.stat()
            stamp.update(f"{file.name} {status.st_size} {status.st_mtime_ns} ".encode())
        self.info, self.arrays = described(folder, f"dcp-{stamp.hexdigest()[:16]}", found)
        self.described = is_described(folder)

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
        """See :class:`ckpt.rewrite.Source`."""
        array = self.arrays[name]
        out = np.empty(box_shape(box), array.dtype)
        for chunk in self.chunks[name]:
            common = intersect(chunk.box, box)
            if common is None:
                continue
            sizes = box_shape(chunk.box)
            plain = _find_numbers(chunk.path, chunk.offset, chunk.length, name, sizes,
                                  array.logical_dtype)  # fmt: skip
            inner = [(part.start, part.stop) for part in within(common, chunk.box)]
            lying = tuple(sizes[dim] for dim in plain.order), tuple(inner[d] for d in plain.order)
            values = read_plain(chunk.path, plain.offset, lying[0], array.dtype, lying[1])
            back = [plain.order.index(dim) for dim in range(len(sizes))]
            out[within(common, box)] = values.transpose(back)
        return out


def is_dcp(path: Path) -> bool:
    """Whether this looks like what :class:`DcpSource` reads."""
    return (path / METADATA).is_file()


def _size(size: Any) -> tuple[int, ...]:
    (numbers,) = size.args
    if not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"{numbers} are no sizes")
    return tuple(numbers)


_Tensors = dict[str, tuple[SourceArray, list[Box]]]
_Places = dict[tuple[str, tuple[int, ...]], Inert]


def _entries(metadata: Inert) -> tuple[_Tensors, _Places, list[str]]:
    """Tensors with their chunks' boxes, where each chunk is, and the names of what is no tensor."""
    tensors: _Tensors = {}
    left_out = []
    for name, entry in metadata.field("state_dict_metadata").items():
        if type(entry).__name__ != "TensorStorageMetadata":
            left_out.append(str(name))
            continue
        dtype = entry.field("properties").state[0]
        boxes = []
        for chunk in entry.field("chunks"):
            offsets, sizes = _size(chunk.field("offsets")), _size(chunk.field("sizes"))
            boxes.append(tuple((o, o + s) for o, s in zip(offsets, sizes, strict=True)))
        tensors[str(name)] = SourceArray(_size(entry.field("size")), dtype), boxes
    places = {}
    for index, info in metadata.field("storage_data").items():
        offset = index.field("offset")
        places[index.field("fqn"), () if offset is None else _size(offset)] = info
    return tensors, places, sorted(left_out)


def _place(folder: Path, name: str, box: Box, places: _Places) -> _Chunk:
    info = places[name, tuple(start for start, _ in box)]
    file, offset, length = (info.field(key) for key in ("relative_path", "offset", "length"))
    if info.field("transform_descriptors"):
        raise CheckpointError(f"{folder / file}: {name} was transformed when it was saved: save it "
                              f"without extensions")  # fmt: skip
    if Path(file).name != file:
        raise CheckpointError(f"{folder}: file ({file}) of {name} must be in the same folder")
    return _Chunk(box, folder / file, int(offset), int(length))


def _check_tiling(path: Path, name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """The chunks are the tensor: none is missing, none lies over another."""
    whole = whole_box(shape)
    filled = sorted(box for box in boxes if all(start < stop for start, stop in box))
    volume = sum(math.prod(box_shape(box)) for box in filled)
    fits = all(len(box) == len(shape) for box in boxes)
    fits = fits and all(intersect(box, whole) == box for box in filled)
    if not fits or volume != math.prod(shape):
        raise CheckpointError(f"{path}: the chunks of {name} do not make up its shape {shape}")
    open_boxes: list[Box] = []
    for box in filled:
        if shape:
            open_boxes = [other for other in open_boxes if other[0][1] > box[0][0]]
        if any(intersect(box, other) is not None for other in open_boxes):
            raise CheckpointError(f"{path}: chunks of {name} lie over each other")
        open_boxes.append(box)


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


@lru_cache(maxsize=65536)
def _find_numbers(
    path: Path, offset: int, length: int, name: str, sizes: tuple[int, ...], logical_dtype: str
) -> _Plain:
    """Where in ``path`` the numbers of a chunk are: what its archive says of itself, checked."""
    where = f"{path}: the chunk of {name} at byte {offset}"
    with readable(path):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        part = _Part(handle, offset, length)
        with zipfile.ZipFile(io.BufferedReader(part, 4096)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            pickled = members["data.pkl"]
            if pickled.compress_type != zipfile.ZIP_STORED or pickled.file_size > _LONGEST_PICKLE:
                raise CheckpointError(f"{where} is no tensor")
            if "byteorder" in members and archive.read(members["byteorder"])[:6] != b"little":
                raise CheckpointError(f"{where} is not little-endian")
            told = read_pickle(archive.read(pickled), where, _TENSOR_CLASSES, _plain)
            key, start, order = _told(told, where, sizes, logical_dtype)
            numbers = members[f"data/{key}"]
            part.seek(numbers.header_offset)
            header = part.read(30)
            at = numbers.header_offset + 30 + int.from_bytes(header[26:28], "little")
            at += int.from_bytes(header[28:30], "little")
            itemsize = np.dtype(STORAGE_DTYPES[logical_dtype]).itemsize
            needed = (start + math.prod(sizes)) * itemsize
            if numbers.compress_type != zipfile.ZIP_STORED or numbers.file_size < needed:
                raise CheckpointError(f"{where} has fewer numbers than it says")
            if header[:4] != b"PK\x03\x04" or at + needed > length:
                raise CheckpointError(f"{where} is not whole")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except (zipfile.BadZipFile, KeyError, NotImplementedError, ValueError) as error:
        raise CheckpointError(f"{where} is not as torch.save writes it: {error}") from None
    finally:
        os.close(handle)
    return _Plain(offset + at + start * itemsize, order)


def _told(
    told: Any, where: str, sizes: tuple[int, ...], logical_dtype: str
) -> tuple[str, int, tuple[int, ...]]:
    """The storage's key, the first element in it, and the order in which dims lie there."""
    if not isinstance(told, Inert) or not type(told).__name__.startswith("_rebuild_tensor_v"):
        raise CheckpointError(f"{where} is no tensor")
    try:
        (_, kind, key, _, _), start, shape, strides, *rest = told.args
        dtype = _STORAGES.get(kind.__name__, rest[2] if len(rest) > 2 else None)
        shape, strides = tuple(map(int, shape)), tuple(map(int, strides))
        start = int(start)
    except (TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{where} is no tensor") from None
    if (shape, dtype) != (sizes, logical_dtype) or start < 0:
        raise CheckpointError(
            f"{where} is {dtype} {shape}, the metadata says {logical_dtype} {sizes}"
        )
    # Dims of one index have any stride. Those of the others must leave no holes.
    order = tuple(sorted(range(len(sizes)), key=lambda d: (sizes[d] > 1, -strides[d], d)))
    expected = 1
    for dim in reversed(order):
        if sizes[dim] > 1 and all(sizes) and strides[dim] != expected:
            raise CheckpointError(f"{where} has strides {strides}: it is not contiguous")
        expected *= max(sizes[dim], 1)
    return str(key), start, order
