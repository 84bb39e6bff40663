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
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt.errors import CheckpointError, readable
from ckpt.format import STORAGE_DTYPES
from ckpt.interop.safe_pickle import Inert, admitted, read_pickle
from ckpt.interop.torch_file import TensorInFile, find_numbers, plain_class, read_torch_file
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


class _Chunk(NamedTuple):
    box: Box
    path: Path
    offset: int
    length: int


class DcpSource:
    """A :class:`ckpt.rewrite.Source` of a torch.distributed.checkpoint folder.

    ``left_out`` names what is no tensor (learning rates, counts, lists): :meth:`read_object` reads
    one. Raises CheckpointError, naming the file, for metadata that names anything unexpected,
    chunks that do not make up their tensor, and dtypes that have no place in a checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / METADATA
        with readable(path):
            data = path.read_bytes()
        try:
            tensors, places, self.left_out = _entries(read_pickle(
                data, str(path), _METADATA_CLASSES, plain_class
            ))  # fmt: skip
            self._objects = {
                name: _place(folder, name, (), places)
                for name in self.left_out
                if (name, ()) in places
            }
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
            numbers = find_numbers(chunk.path, chunk.offset, chunk.length, name, sizes,
                                   array.logical_dtype)  # fmt: skip
            inner = tuple((part.start, part.stop) for part in within(common, chunk.box))
            tensor = TensorInFile(chunk.path, sizes, array.logical_dtype, numbers)
            out[within(common, box)] = tensor.read(inner)
        return out

    def read_object(self, name: str) -> Any:
        """What is no tensor: see :func:`ckpt.interop.torch_file.read_torch_file`.

        Raises CheckpointError, naming the file, where it cannot be read as data, and KeyError for a
        name that is not in ``left_out`` or has no bytes.
        """
        chunk = self._objects[name]
        return read_torch_file(chunk.path, chunk.offset, chunk.length)


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
