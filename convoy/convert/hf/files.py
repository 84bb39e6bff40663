"""The weights of a Hugging Face folder: its safetensors files as a source, and a source as such
files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt.interop import (
    SAFETENSORS_DTYPES,
    SAFETENSORS_INDEX,
    SAFETENSORS_SINGLE,
    SafetensorsSource,
)
from ckpt.rewrite import (
    MEMORY,
    Converted,
    Joined,
    Rows,
    Source,
    SourceArray,
    Stacked,
    Transposed,
    Unstacked,
    row_major_boxes,
)
from convoy.convert.hf.tensors import HFTensor
from pretrain.errors import InputError
from pretrain.state import EXPERT_BIAS, in_decoder

_MTP_OWN = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
"""What no other layer has."""
_READABLE = ("F32", "BF16", "F16")
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BUFFERS = r".*\.rotary_emb\.inv_freq"
_IN_FILES = {logical: name for name, logical in SAFETENSORS_DTYPES.items()}


def has_mtp(folder: Path, num_layers: int) -> bool:
    """Whether a folder's files have multi-token prediction after ``num_layers`` layers. A config
    may speak of it where the files have none, as after a save by transformers.

    Raises CheckpointError as :func:`open_hf` does.
    """
    if not any((folder / name).exists() for name in (SAFETENSORS_INDEX, SAFETENSORS_SINGLE)):
        return False
    arrays = SafetensorsSource(folder).arrays
    return any(f"model.layers.{num_layers}.{own}" in arrays for own in _MTP_OWN)


def open_hf(
    folder: Path,
    expected: Sequence[HFTensor],
    num_layers: int,
    spare_layers: int,
    ignored: str | None = None,
) -> SafetensorsSource:
    """The tensors of a folder's safetensors files, by the names that they have there.

    ``spare_layers`` after ``num_layers`` are not looked at where nothing of them is expected: those
    of multi-token prediction, of a family that Convoy has without. Neither are tensors whose names
    match ``ignored``. Copies may be missing.

    Raises InputError, naming the file, where there are no such files, and for tensors that are
    missing, unexpected, or of another shape or dtype; and CheckpointError for files that are not
    whole.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder")
    if not any((folder / name).exists() for name in (SAFETENSORS_INDEX, SAFETENSORS_SINGLE)):
        pickles = sorted(p.name for s in ("bin", "pt", "pth") for p in folder.glob(f"*.{s}"))
        if pickles:
            raise InputError(
                f"{folder / pickles[0]} is pickle, which can run code and is never read: "
                f"save the model as safetensors"
            )
        raise InputError(f"{folder} has no {SAFETENSORS_SINGLE} and no {SAFETENSORS_INDEX}")
    source = SafetensorsSource(folder)
    wanted = dict(tensor.in_files for tensor in expected if not tensor.copy)
    originals = {t.array: t.name for t in expected if not t.indices and not t.copy}
    copies = {t.name: originals[t.array] for t in expected if t.copy}
    if any(int(match[1]) >= num_layers for match in map(_LAYER.match, wanted) if match):
        spare_layers = 0
    unread = re.compile(f"{_BUFFERS}|{ignored}" if ignored else _BUFFERS)
    for name in source.arrays:
        path = source.places[name].path
        if name.endswith("weight_scale_inv"):
            raise InputError(f"{path}: {name}: the weights are fp8; convert them to bf16 first")
        layer = _LAYER.match(name)
        spare = layer and 0 <= int(layer[1]) - num_layers < spare_layers
        if name in copies:
            _check_same(source, name, copies[name], "multi-token prediction shares it")
        elif name not in wanted and not spare and not unread.fullmatch(name):
            _check_duplicate(source, name, path, wanted)
    for name, shape in wanted.items():
        _check_tensor(source, name, shape, folder)
    return source


def _check_tensor(
    source: SafetensorsSource, name: str, shape: tuple[int, ...], folder: Path
) -> None:
    if name not in source.arrays:
        hint = "; config.json does not tie it" if name == _HEAD else ""
        raise InputError(f"{folder}: tensor {name} is missing{hint}")
    where, array = f"{source.places[name].path}: {name}", source.arrays[name]
    if array.shape != shape:
        raise InputError(f"{where} has shape {list(array.shape)}, config.json needs {list(shape)}")
    dtype = _IN_FILES[array.logical_dtype]
    if dtype not in _READABLE:
        raise InputError(f"{where} has dtype {dtype}, one of {', '.join(_READABLE)} is read")


def _check_duplicate(
    source: SafetensorsSource, name: str, path: Path, wanted: Mapping[str, object]
) -> None:
    """A tied head may be stored, if it is the embedding."""
    if name != _HEAD or _EMBED not in source.arrays or _EMBED not in wanted:
        raise InputError(f"{path}: tensor {name} is unexpected: nothing in config.json has it")
    _check_same(source, name, _EMBED, "config.json's tie_word_embeddings is true")


def _check_same(source: SafetensorsSource, name: str, original: str, why: str) -> None:
    copy, first = source.arrays[name], source.arrays.get(original)
    if first is None:
        return  # the error is that of the original, which is missing
    boxes = row_major_boxes(copy.shape, copy.dtype.itemsize, MEMORY // 8)
    if (copy.shape, copy.logical_dtype) != (first.shape, first.logical_dtype) or any(
        source.read_box(name, box).tobytes() != source.read_box(original, box).tobytes()
        for box in boxes
    ):
        raise InputError(f"{source.places[name].path}: {name} must be {original} where {why}")


def from_hf(
    source: Source, tensors: Sequence[HFTensor], arrays: Mapping[str, SourceArray]
) -> Source:
    """Hugging Face tensors as a decoder's ``arrays``: layers and experts stacked, the experts'
    matrices transposed, numbers in the files' dtypes."""
    members: dict[str, dict[tuple[int, ...], str]] = {}
    for tensor in (tensor for tensor in tensors if not tensor.copy):
        members.setdefault(tensor.array, {})[tensor.indices] = tensor.name
    turned = Transposed(
        _parts(source, tensors), [tensor.name for tensor in tensors if tensor.transposed]
    )
    return Stacked(turned, members, {name: array.attributes for name, array in arrays.items()})


def to_hf(source: Source, tensors: Sequence[HFTensor], dtype: str) -> Source:
    """The inverse of :func:`from_hf`, in ``dtype``.

    Experts' biases stay in float32, as those of DeepSeek do: in bfloat16 other experts would be
    chosen.
    """
    single = Unstacked(source, {tensor.name: (tensor.array, tensor.indices) for tensor in tensors})
    turned = Transposed(single, [tensor.name for tensor in tensors if tensor.transposed])
    biases = [tensor.name for tensor in tensors if in_decoder(tensor.array) == EXPERT_BIAS]
    others = [tensor.name for tensor in tensors if in_decoder(tensor.array) != EXPERT_BIAS]
    return _wholes(Converted(Converted(turned, biases, "float32"), others, dtype), tensors)


def _parts(files: Source, tensors: Sequence[HFTensor]) -> Source:
    """The files' tensors as ``tensors``, those that are within larger ones cut out of them."""
    if all(tensor.within is None for tensor in tensors):
        return files
    members: dict[str, tuple[str, tuple[int, ...]]] = {}
    rows: dict[str, tuple[str, tuple[tuple[int, int], ...] | None]] = {}
    for tensor in (tensor for tensor in tensors if not tensor.copy):
        within = tensor.within
        if within is None:
            members[tensor.name], rows[tensor.name] = (tensor.name, ()), (tensor.name, None)
            continue
        led = f"{within.tensor} {list(within.lead)}"
        members[led] = (within.tensor, within.lead)
        count = tensor.shape[0]
        extent = (
            ((within.piece * count, (within.piece + 1) * count),) if within.pieces > 1 else None
        )
        rows[tensor.name] = (led, extent)
    return Rows(Unstacked(files, members), rows)


def _wholes(source: Source, tensors: Sequence[HFTensor]) -> Source:
    """The inverse of :func:`_parts`: what the files have, in the order of ``tensors``."""
    if all(tensor.within is None for tensor in tensors):
        return source
    joined: dict[str, dict[int, str]] = {}
    members: dict[str, dict[tuple[int, ...], str]] = {}
    for tensor in tensors:
        within = tensor.within
        if within is None:
            joined[tensor.name], members[tensor.name] = {0: tensor.name}, {(): tensor.name}
            continue
        led = f"{within.tensor} {list(within.lead)}"
        joined.setdefault(led, {})[within.piece] = tensor.name
        members.setdefault(within.tensor, {})[within.lead] = led
    parts = {name: tuple(of[i] for i in sorted(of)) for name, of in joined.items()}
    return Stacked(Joined(source, parts), members, {})
