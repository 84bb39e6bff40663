"""Hugging Face checkpoints on disk: safetensors files read and written tensor by tensor."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pretrain.convert.hf.tensors import HFTensor
from pretrain.errors import InputError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_READABLE = ("F32", "BF16", "F16")
_WRITABLE = {torch.float32: "F32", torch.bfloat16: "BF16"}
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")


def _safe_open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise InputError(
            "reading Hugging Face checkpoints needs the package safetensors: "
            "pip install 'convoy-moe[hf]'"
        ) from None
    try:
        return safe_open(path, framework="pt")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # SafetensorError, which is no more than an Exception
        raise InputError(f"{path} is no whole safetensors file: {error}") from None


class HFCheckpoint:
    """The tensors of a folder of safetensors files, by name, read one at a time.

    Raises InputError, naming the file, where there are none, or one is missing or damaged, or is of
    a kind that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}
        """The file of every tensor."""
        self._open: tuple[Path, Any] | None = None
        for path in self._paths():
            for name in self._file(path).keys():  # noqa: SIM118 - it is no dict
                if name in self.files:
                    raise InputError(f"{path}: {name} must be in one file, and is in another too")
                self.files[name] = path
        self._check_index()

    def _paths(self) -> list[Path]:
        if not self.folder.is_dir():
            raise InputError(f"{self.folder} is not a folder")
        if (self.folder / _INDEX).exists():
            return sorted({self.folder / file for file in self._weight_map().values()})
        if (self.folder / _SINGLE).exists():
            return [self.folder / _SINGLE]
        pickles = sorted(p.name for s in ("bin", "pt", "pth") for p in self.folder.glob(f"*.{s}"))
        if pickles:
            raise InputError(
                f"{self.folder / pickles[0]} is pickle, which can run code and is never read: "
                f"save the model as safetensors"
            )
        raise InputError(f"{self.folder} has no {_SINGLE} and no {_INDEX}")

    def _weight_map(self) -> dict[str, str]:
        path = self.folder / _INDEX
        try:
            found = json.loads(path.read_text())["weight_map"]
            names = {str(name): str(file) for name, file in found.items()}
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError(f"{path} must be JSON with a weight_map") from None
        for file in names.values():
            if Path(file).name != file:
                raise InputError(f"{path}: file ({file}) must be in the same folder")
        return names

    def _check_index(self) -> None:
        if (self.folder / _INDEX).exists():
            for name, file in self._weight_map().items():
                if self.files.get(name) != self.folder / file:
                    raise InputError(f"{self.folder / file}: {name} is missing; {_INDEX} lists it")

    def _file(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._open = path, _safe_open(path)
        return self._open[1]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape in the file."""
        return tuple(self._file(self.files[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype in the file, ``F32`` and so on."""
        return str(self._file(self.files[name]).get_slice(name).get_dtype())

    def read(self, name: str) -> Tensor:
        """One tensor as it is in the file."""
        tensor: Tensor = self._file(self.files[name]).get_tensor(name)
        return tensor

    def check(self, expected: Sequence[HFTensor], num_layers: int, spare_layers: int) -> None:
        """Refuse tensors that are missing, unexpected, or of another shape or dtype.

        ``spare_layers`` after ``num_layers`` are left out of account: multi-token prediction's.
        """
        wanted = {tensor.name: tensor for tensor in expected}
        for name, path in self.files.items():
            if name.endswith("weight_scale_inv"):
                raise InputError(f"{path}: {name}: the weights are fp8; convert them to bf16 first")
            layer = re.match(r"model\.layers\.(\d+)\.", name)
            spare = layer and 0 <= int(layer[1]) - num_layers < spare_layers
            if name not in wanted and not spare and not _BUFFERS.fullmatch(name):
                self._check_duplicate(name, path, wanted)
        for name, tensor in wanted.items():
            if name not in self.files:
                hint = "; config.json does not tie it" if name == "lm_head.weight" else ""
                raise InputError(f"{self.folder}: tensor {name} is missing{hint}")
            where = f"{self.files[name]}: {name}"
            if self.shape(name) != tensor.shape:
                raise InputError(
                    f"{where} has shape {list(self.shape(name))}, config.json needs "
                    f"{list(tensor.shape)}"
                )
            if self.dtype(name) not in _READABLE:
                raise InputError(
                    f"{where} has dtype {self.dtype(name)}, one of {', '.join(_READABLE)} is read"
                )

    def _check_duplicate(self, name: str, path: Path, wanted: dict[str, HFTensor]) -> None:
        """A tied head may be stored, if it is the embedding."""
        embed = "model.embed_tokens.weight"
        if name != "lm_head.weight" or embed not in self.files or embed not in wanted:
            raise InputError(f"{path}: tensor {name} is unexpected: nothing in config.json has it")
        if not torch.equal(self.read(name), self.read(embed)):
            raise InputError(
                f"{path}: {name} must be {embed} where config.json's tie_word_embeddings is true"
            )


class HFWeights:
    """A :class:`pretrain.weights.WeightSource` of a Hugging Face checkpoint."""

    def __init__(self, checkpoint: HFCheckpoint, tensors: Sequence[HFTensor]) -> None:
        self.checkpoint = checkpoint
        self.names = {(tensor.parameter, tensor.expert): tensor.name for tensor in tensors}

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A parameter, in the file's dtype."""
        tensor = self.checkpoint.read(self.names[name, expert])
        return tensor if expert is None else tensor.T


class _Entry(NamedTuple):
    tensor: HFTensor
    dtype: torch.dtype
    num_bytes: int


def write_safetensors(
    folder: Path,
    tensors: Sequence[HFTensor],
    read: Callable[[HFTensor], Tensor],
    dtype: torch.dtype,
    max_file_bytes: int,
) -> int:
    """Write ``model.safetensors``, or numbered files and their index; returns the bytes of tensors.

    One tensor is in memory at a time: the library writes only what is all there. A file is a length
    (uint64), a JSON header of dtypes, shapes and offsets, and the tensors end to end. A file has at
    most ``max_file_bytes`` of tensors, or one tensor. An expert's bias stays in float32, as
    DeepSeek's do: bfloat16 would change who is chosen.
    """
    files: list[list[_Entry]] = [[]]
    filled = total = 0
    for tensor in tensors:
        of = torch.float32 if tensor.name.endswith("e_score_correction_bias") else dtype
        size = torch.Size(tensor.shape).numel() * of.itemsize
        if files[-1] and filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(_Entry(tensor, of, size))
        filled, total = filled + size, total + size
    if len(files) == 1:
        _write_file(folder / _SINGLE, files[0], read)
        return total
    weight_map = {}
    for i, entries in enumerate(files, 1):
        name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, entries, read)
        weight_map.update({entry.tensor.name: name for entry in entries})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / _INDEX, index)
    return total


def _write_file(path: Path, entries: list[_Entry], read: Callable[[HFTensor], Tensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor, dtype, size in entries:
        header[tensor.name] = {
            "dtype": _WRITABLE[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned
    with _durable(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, dtype, size in entries:
            value = read(tensor).to(dtype).contiguous()
            assert (tuple(value.shape), value.nbytes) == (tensor.shape, size), tensor
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a small JSON file and make it durable."""
    with _durable(path) as file:
        file.write((json.dumps(values, indent=2) + "\n").encode())


@contextmanager
def _durable(path: Path) -> Iterator[Any]:
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
