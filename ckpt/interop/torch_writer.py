"""Writing a file that torch.load reads, with one large tensor in it, a stretch at a time.

torch.save needs the whole tensor in memory. Here the pickle is written first, and the numbers after
it as they come.
"""

from __future__ import annotations

import importlib
import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, NamedTuple, cast

import torch

from ckpt.interop.torch_file import STORAGES
from ckpt.rewrite import Checked

_STORAGE_OF = {logical: name for name, logical in STORAGES.items()}


class _Storage(NamedTuple):
    logical_dtype: str
    elements: int


class Numbers(NamedTuple):
    """Stands for the tensor in the value that is written."""

    shape: tuple[int, ...]
    logical_dtype: str


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        kind = getattr(torch, _STORAGE_OF[obj.logical_dtype])
        return ("storage", kind, "0", "cpu", obj.elements)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Numbers):
            return NotImplemented
        strides = tuple(math.prod(obj.shape[i + 1 :]) for i in range(len(obj.shape)))
        storage = _Storage(obj.logical_dtype, math.prod(obj.shape))
        # The function is part of the format: every file of torch.save names it.
        rebuild = importlib.import_module("torch._utils")._rebuild_tensor_v2
        return rebuild, (storage, 0, obj.shape, strides, False, OrderedDict())


def write_torch_file(
    file: Checked, value: Mapping[str, Any], numbers: Callable[[], Iterable[Any]]
) -> None:
    """Write ``value`` as torch.save does.

    Args:
        file: a new file.
        value: what torch.load returns, with one :class:`Numbers` in the place of a tensor.
        numbers: yields the tensor's numbers, row-major, as buffers.
    """
    pickled = io.BytesIO()
    _Pickler(pickled, 2).dump(dict(value))
    with zipfile.ZipFile(cast(IO[bytes], file), "w", zipfile.ZIP_STORED) as archive:

        def member(name: str) -> zipfile.ZipInfo:
            return zipfile.ZipInfo(f"archive/{name}")  # of one fixed date

        archive.writestr(member("data.pkl"), pickled.getvalue())
        archive.writestr(member("byteorder"), b"little")
        with archive.open(member("data/0"), "w", force_zip64=True) as out:
            for block in numbers():
                out.write(block)
        archive.writestr(member("version"), b"3\n")
