"""Certificates: a hash of each expert's matrices, and of each other array of each layer.

Hashes are of numbers in Convoy's form and order, floats as float32, little-endian. They do not
depend on the format, the files, the layers' stacking, or a dtype that float32 can hold: checkpoints
of two formats are compared by them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.format import FLOATS, to_float32
from ckpt.rewrite import Source, row_major_boxes
from convoy.convert.formats.opened import Opened
from convoy.convert.formats.rules import split_slot
from parallel.layout import Box
from pretrain.errors import InputError
from pretrain.state import MODEL, is_expert_matrix

CERTIFICATE = "certificate.json"
_FORMAT = "convoy-certificate"
_SLAB = 64 << 20


def hashes(source: Source) -> dict[str, str]:
    """By a name such as ``model/layers/moe/experts/w_up layer 3 expert 17``, a SHA-256.

    In memory is at most 64 MiB of an array, or one matrix of one expert where that is larger in
    the order of its rows.
    """
    return {label: _hash(source, name, box) for label, name, box in _pieces(source)}


def _pieces(source: Source) -> Iterator[tuple[str, str, Box]]:
    for name, array in sorted(source.arrays.items()):
        path = split_slot(name)[1]
        rest = tuple((0, size) for size in array.shape)
        if not path.startswith(("layers/", "mtp/layers/")):
            yield name, name, rest
            continue
        numbers = array.attributes.get("layers", range(array.shape[0]))
        for i, layer in enumerate(numbers):
            if not is_expert_matrix(MODEL + path):
                yield f"{name} layer {layer}", name, ((i, i + 1), *rest[1:])
                continue
            for expert in range(array.shape[1]):
                box = ((i, i + 1), (expert, expert + 1), *rest[2:])
                yield f"{name} layer {layer} expert {expert}", name, box


def _hash(source: Source, name: str, piece: Box) -> str:
    """Of the sizes and the numbers of a piece of an array."""
    array = source.arrays[name]
    sizes = [stop - start for start, stop in piece]
    while len(sizes) > 1 and sizes[0] == 1:
        sizes = sizes[1:]
    made = hashlib.sha256(str(sizes).encode())
    shape = tuple(stop - start for start, stop in piece)
    for inner in row_major_boxes(shape, max(array.dtype.itemsize, 4), _SLAB):
        box = tuple((s + b, e + b) for (s, e), (b, _) in zip(inner, piece, strict=True))
        values = source.read_box(name, box)
        if array.logical_dtype in FLOATS and array.logical_dtype != "float64":
            values = to_float32(values, array.logical_dtype)
        made.update(np.ascontiguousarray(values).reshape(-1).view("u1").data)
    return made.hexdigest()


def certificate_of(source: Opened, sha256: Mapping[str, str]) -> dict[str, Any]:
    """What a certificate says of one checkpoint."""
    return {
        "format": source.form,
        "kind": source.kind,
        "training": source.training.as_json(),
        "sha256": dict(sha256),
    }


def write_certificate(
    folder: Path, before: dict[str, Any], after: dict[str, Any], source: Opened
) -> Path:
    """Write ``certificate.json`` into a checkpoint's folder, durably and at once.

    It has the hashes of the checkpoint that was read and of the one that was written, and Convoy's
    spec and state of the run, where they are known, for a later way back.
    """
    path = folder / CERTIFICATE
    value = {
        "format": _FORMAT,
        "version": 1,
        "before": before,
        "after": after,
        "spec": dict(source.info.spec),
        "state": dict(source.info.state),
    }
    unfinished = path.with_name(f".{CERTIFICATE}.part")
    with unfinished.open("w") as file:
        file.write(json.dumps(value, indent=1, sort_keys=True) + "\n")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    return path


def read_certificate(path: Path) -> dict[str, Any]:
    """A certificate. Raises InputError for a file that is none."""
    try:
        value = json.loads(path.read_text())
        if value["format"] != _FORMAT or not isinstance(value["after"]["sha256"], dict):
            raise ValueError
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path} is no certificate: convoy convert move writes one") from None
    assert isinstance(value, dict)
    return value


def carried(folder: Path) -> dict[str, Any]:
    """What a certificate beside a checkpoint knows that the checkpoint's format cannot hold."""
    path = folder / CERTIFICATE
    return read_certificate(path) if path.is_file() else {}


def differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """One line for each hash that is missing on one side, or is another."""
    lines = []
    for label in sorted(first.keys() | second.keys()):
        if label not in first or label not in second:
            lines.append(f"{label} is only in the {'second' if label not in first else 'first'}")
        elif first[label] != second[label]:
            lines.append(f"{label} differs")
    return lines


def check_equal(before: Mapping[str, str], after: Mapping[str, str], folder: Path) -> None:
    """Raises CheckpointError where what was written is not what was read."""
    lines = differences(before, after)
    if lines:
        raise CheckpointError(
            f"{folder} is not what was read: {lines[0]}, and {len(lines) - 1} more; do not use it"
        )
