"""Weights without an optimizer: where they come from, and checkpoints of them alone.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

import ckpt
from ckpt import ArraySpec, CheckpointError, LocalArray, Manifest, SaveInfo
from moe import MoEConfig
from parallel import Topology, expert_parameter_names
from parallel.layout import Box
from pretrain.model import first_matrix, meta_decoder
from pretrain.spec import JobSpec
from pretrain.state import model_arrays, parameter_layouts

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_EXPERTS = re.compile(r"(layers\.\d+)\.moe\.experts\.(w_gate|w_up|w_down)")


class WeightSource(Protocol):
    """Parameters and buffers of a decoder, by name, one at a time."""

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """A parameter in any float dtype; of an expert parameter [E, ...], one expert's part."""
        ...


class CheckpointWeights:
    """The weights of a checkpoint, whatever topology it was saved under. Moments are not read."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root, self.manifest = root, manifest

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """See :class:`WeightSource`. Raises CheckpointError where it is missing or damaged."""
        match = _LAYER.fullmatch(name)
        stacked = name if match is None else f"layers.{match[2]}"
        record = self.manifest.array(f"model/{stacked.replace('.', '/')}")
        box: list[tuple[int, int]] = [(0, size) for size in record.shape]
        if match is not None:
            layers = record.attributes["layers"]
            if int(match[1]) not in layers:
                raise CheckpointError(
                    f"checkpoint array {record.name} has layers {layers}, not {match[1]}"
                )
            index = layers.index(int(match[1]))
            box[0] = (index, index + 1)
        if expert is not None:
            box[1] = (expert, expert + 1)
        dtype = getattr(torch, record.logical_dtype)
        spec = ArraySpec(record.name, record.shape, dtype, record.splits, record.attributes)
        out = torch.empty([stop - start for start, stop in box], dtype=dtype)
        ckpt.load(self.root, self.manifest, [LocalArray(spec, [tuple(box)], [out])])
        kept = (match is not None) + (expert is not None)
        return out.view(out.shape[kept:])


class UpcycledWeights:
    """A dense decoder's weights as those of a MoE (Komatsuzaki et al., arXiv 2212.05055).

    Every expert is a copy of the layer's dense feed-forward and the router is fresh: as long as a
    token's weights sum to one, the output is the dense model's.
    """

    def __init__(self, dense: WeightSource, moe: MoEConfig, num_layers: int, seed: int) -> None:
        self.moe, self.num_layers, self.seed = moe, num_layers, seed
        self._read = lru_cache(maxsize=1)(dense.read)  # for one expert after another

    def read(self, name: str, expert: int | None = None) -> Tensor:
        """See :class:`WeightSource`."""
        match = _EXPERTS.fullmatch(name)
        if match is not None:
            return self._read(f"{match[1]}.ffn.{match[2]}.weight").T
        if name.endswith(".moe.router.weight"):
            shape = (self.moe.num_experts, self.moe.d_model)
            return first_matrix(name, shape, self.moe.d_model, self.num_layers, self.seed)
        if name.endswith(".moe.router.expert_bias"):
            return torch.zeros(self.moe.num_experts)
        return self._read(name)


def save_weights(
    root: Path, spec: JobSpec, source: WeightSource, state: dict[str, Any]
) -> Manifest:
    """Commit a checkpoint of step 0 that holds the weights of ``spec``'s model alone.

    A few chunks (of some 4 MiB) and one parameter of ``source``, or one expert's part of it, are in
    memory at a time. Numbers are converted to the model's dtype.

    Raises CheckpointError where the folder cannot be written, or has step 0; and what ``source``
    raises.
    """
    topology = Topology()
    decoder = meta_decoder(spec.model, spec.moe)
    experts = expert_parameter_names(decoder)
    info = SaveInfo(
        save_id=f"00000000-weights-{secrets.token_hex(4)}",
        step=0,
        topology=topology,
        state=state,
        spec=spec.as_dict(),
        spec_hash=spec.hash,
    )
    read = lru_cache(maxsize=1)(source.read)  # for one object of a parameter after another
    arrays = []
    for array in model_arrays(decoder, decoder, parameter_layouts(decoder, topology), 0):
        names = _parameter_names(array.spec)
        boxes = partial(_read_box, read, array.spec, names, names[0] in experts)
        arrays.append((array.spec.record(topology), boxes))
    return ckpt.save_streamed(root, info, arrays, threads=1)  # what is read is kept once


def _parameter_names(spec: ArraySpec) -> list[str]:
    name = spec.name.removeprefix("model/").replace("/", ".")
    if "layers" not in spec.attributes:
        return [name]
    suffix = name.removeprefix("layers.")
    return [f"layers.{layer}.{suffix}" for layer in spec.attributes["layers"]]


def _read_box(
    read: Any,
    spec: ArraySpec,
    names: Sequence[str],
    of_experts: bool,
    box: Box,
    values: np.ndarray[Any, Any],
) -> None:
    """Fill ``values`` with the numbers of a box of a stacked array, [L, ...] or [L, E, ...],
    parameter by parameter."""
    assert spec.dtype == torch.float32, "stored as numpy has them"
    out = torch.from_numpy(values)
    stacked = "layers" in spec.attributes
    first = box[0][0] if stacked else 0
    experts = range(*box[1]) if of_experts else [None]
    inner = tuple(slice(*extent) for extent in box[stacked + of_experts :])
    for layer in range(*box[0]) if stacked else [0]:
        for expert in experts:
            at = ((layer - first,) if stacked else ()) + (
                () if expert is None else (expert - box[1][0],)
            )
            out[at].copy_(read(names[layer], expert)[inner])
