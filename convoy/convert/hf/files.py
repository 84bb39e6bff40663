"""The weights of a Hugging Face folder: safetensors files as a source, and a source as files."""

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
    Source,
    SourceArray,
    Stacked,
    Transposed,
    Unstacked,
    row_major_boxes,
)
from convoy.convert.hf.tensors import MTP_OWN, HFTensor
from pretrain.errors import InputError

_READABLE = ("F32", "BF16", "F16")
_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_EXPERT_BIAS = "e_score_correction_bias"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_BUFFERS = re.compile(r".*\.rotary_emb\.inv_freq")
_IN_FILES = {logical: name for name, logical in SAFETENSORS_DTYPES.items()}


def has_mtp(folder: Path, num_layers: int) -> bool:
    """Whether a folder's files have multi-token prediction after ``num_layers`` layers. A config
    may speak of it where the files have none, as after a save by transformers.

    Raises CheckpointError as :func:`open_hf` does.
    """
    if not any((folder / name).exists() for name in (SAFETENSORS_INDEX, SAFETENSORS_SINGLE)):
        return False
    arrays = SafetensorsSource(folder).arrays
    return any(f"model.layers.{num_layers}.{own}" in arrays for own in MTP_OWN)


def open_hf(
    folder: Path, expected: Sequence[HFTensor], num_layers: int, spare_layers: int
) -> SafetensorsSource:
    """The tensors of a folder's safetensors files, by the names that they have there.

    ``spare_layers`` after ``num_layers`` are not looked at where nothing of them is expected: those
    of multi-token prediction, of a family that Convoy has without. Copies may be missing.

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
    wanted = {tensor.name: tensor for tensor in expected if not tensor.copy}
    originals = {t.array: t.name for t in wanted.values() if not t.place}
    copies = {t.name: originals[t.array] for t in expected if t.copy}
    if any(int(match[1]) >= num_layers for match in map(_LAYER.match, wanted) if match):
        spare_layers = 0
    for name in source.arrays:
        path = source.places[name].path
        if name.endswith("weight_scale_inv"):
            raise InputError(f"{path}: {name}: the weights are fp8; convert them to bf16 first")
        layer = _LAYER.match(name)
        spare = layer and 0 <= int(layer[1]) - num_layers < spare_layers
        if name in copies:
            _check_same(source, name, copies[name], "multi-token prediction shares it")
        elif name not in wanted and not spare and not _BUFFERS.fullmatch(name):
            _check_duplicate(source, name, path, wanted)
    for tensor in wanted.values():
        _check_tensor(source, tensor, folder)
    return source


def _check_tensor(source: SafetensorsSource, tensor: HFTensor, folder: Path) -> None:
    name = tensor.name
    if name not in source.arrays:
        hint = "; config.json does not tie it" if name == _HEAD else ""
        raise InputError(f"{folder}: tensor {name} is missing{hint}")
    where, array = f"{source.places[name].path}: {name}", source.arrays[name]
    if array.shape != tensor.shape:
        raise InputError(
            f"{where} has shape {list(array.shape)}, config.json needs {list(tensor.shape)}"
        )
    dtype = _IN_FILES[array.logical_dtype]
    if dtype not in _READABLE:
        raise InputError(f"{where} has dtype {dtype}, one of {', '.join(_READABLE)} is read")


def _check_duplicate(
    source: SafetensorsSource, name: str, path: Path, wanted: Mapping[str, HFTensor]
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
    for tensor in (each for each in tensors if not each.copy):
        members.setdefault(tensor.array, {})[tensor.place] = tensor.name
    turned = Transposed(source, [tensor.name for tensor in tensors if tensor.transposed])
    return Stacked(turned, members, {name: array.attributes for name, array in arrays.items()})


def to_hf(source: Source, tensors: Sequence[HFTensor], dtype: str) -> Source:
    """The inverse of :func:`from_hf`, in ``dtype``.

    Experts' biases stay in float32, as those of DeepSeek do: in bfloat16 other experts would be
    chosen.
    """
    single = Unstacked(source, {tensor.name: (tensor.array, tensor.place) for tensor in tensors})
    turned = Transposed(single, [tensor.name for tensor in tensors if tensor.transposed])
    biases = [tensor.name for tensor in tensors if tensor.name.endswith(_EXPERT_BIAS)]
    others = [tensor.name for tensor in tensors if not tensor.name.endswith(_EXPERT_BIAS)]
    return Converted(Converted(turned, biases, "float32"), others, dtype)
