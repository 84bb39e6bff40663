"""Models grown out of others: MoEs of dense models, and wider feed-forwards.

Legend: L layers, E experts, D d_model, F d_ff, N copies of a hidden unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.format import FLOATS, convert, to_float32
from ckpt.rewrite import Source, SourceArray, SourceInfo, changed
from moe import MoEConfig
from parallel import Topology
from parallel.layout import Box, box_shape, whole_box, within
from pretrain.errors import InputError
from pretrain.model import ModelConfig, first_matrix, meta_decoder
from pretrain.parallelize import parameter_layouts
from pretrain.spec import JobSpec, resolve_spec
from pretrain.state import (
    EXPERT_BIAS,
    MODEL,
    ROUTER,
    dense_name,
    feed_forward,
    in_decoder,
    model_arrays,
    parameter_name,
)

Values = np.ndarray[Any, Any]


def weight_arrays(model: ModelConfig, moe: MoEConfig | None) -> dict[str, SourceArray]:
    """Every array of a decoder's parameters and buffers, by name, as a checkpoint has them."""
    decoder = meta_decoder(model, moe)
    arrays = model_arrays(decoder, decoder, parameter_layouts(decoder, Topology()), 0)
    return {
        spec.name: SourceArray(spec.shape, spec.logical_dtype, spec.splits, spec.attributes)
        for spec in (array.spec for array in arrays)
    }


def misfit(source: Source, wanted: Mapping[str, SourceArray], whose: str) -> str | None:
    """The first array of a source whose shape or layers are not the wanted ones, for an error.

    None where there is no such array. Arrays of the source that are no weights are not looked at.

    Args:
        source: what was found.
        wanted: as :func:`weight_arrays` gives them.
        whose: the model that needs ``wanted``, for the error.
    """
    weights = {name: array for name, array in source.arrays.items() if name.startswith(MODEL)}
    for name in sorted(wanted.keys() | weights.keys()):
        has, needs = weights.get(name), wanted.get(name)
        if has is None or needs is None or has.shape != needs.shape:
            shapes = [None if array is None else array.shape for array in (has, needs)]
            return f"{name} has shape {shapes[0]} but {whose} needs {shapes[1]}"
        layers = [array.attributes.get("layers") for array in (has, needs)]
        if layers[0] != layers[1]:
            return f"{name} has layers {layers[0]} but {whose} needs {layers[1]}"
    return None


class Upcycled:
    """A dense source as the MoE of a spec (Komatsuzaki et al., arXiv 2212.05055).

    Every expert is a copy of its layer's dense feed-forward, and the router has initial weights: as
    long as a token's weights sum to one, the output is the dense model's.

    Raises CheckpointError where the source is not the dense model that the spec grows from.
    """

    def __init__(self, dense: Source, spec: JobSpec) -> None:
        assert spec.moe is not None
        self.dense, self.moe = dense, spec.moe
        self.num_layers, self.seed = spec.model.num_layers, spec.train.seed
        self.info = changed(dense.info, ("upcycled", spec.hash))
        model = spec.model.model_copy(update={"first_k_dense": 0, "d_ff": spec.moe.d_ff})
        wrong = misfit(dense, weight_arrays(model, None), "the dense model")
        if wrong is not None:
            raise CheckpointError(f"array {wrong}")
        self.arrays = {
            name: array
            if in_decoder(name) in (ROUTER, EXPERT_BIAS)
            else replace(array, logical_dtype=dense.arrays[dense_name(name)].logical_dtype)
            for name, array in weight_arrays(spec.model, spec.moe).items()
        }

    def read_box(self, name: str, box: Box) -> Values:
        """See :class:`ckpt.rewrite.Source`."""
        array, old = self.arrays[name], dense_name(name)
        if in_decoder(name) in (ROUTER, EXPERT_BIAS):
            return self._router(name, box)
        if "layers" not in array.attributes:
            return self.dense.read_box(name, box)
        layers = array.attributes["layers"]
        first = self.dense.arrays[old].attributes["layers"].index(layers[0])
        # The layers that stay dense are the first ones, and so both kinds are in a row.
        rows = (first + box[0][0], first + box[0][1])
        if old == name:
            return self.dense.read_box(name, (rows, *box[1:]))
        values_LDF = self.dense.read_box(old, (rows, box[3], box[2])).transpose(0, 2, 1)
        return np.repeat(values_LDF[:, None], box[1][1] - box[1][0], axis=1)

    def _router(self, name: str, box: Box) -> Values:
        out = np.zeros(box_shape(box), np.float32)
        if in_decoder(name) == ROUTER:
            shape = self.arrays[name].shape[1:]
            for i, layer in enumerate(self.arrays[name].attributes["layers"][slice(*box[0])]):
                parameter = parameter_name(name, layer)
                whole_ED = first_matrix(parameter, shape, shape[1], self.num_layers, self.seed)
                out[i] = whole_ED.numpy()[within(box[1:], whole_box(shape))]
        return out


def upcycled_spec(
    sections: dict[str, Any],
    num_experts: int,
    top_k: int,
    first_k_dense: int,
    overrides: Sequence[str],
    where: str,
) -> JobSpec:
    """The spec of a MoE whose experts are copies of a dense model's layers.

    Raises InputError where the model is not dense, or experts would have other sizes.
    """
    if sections["moe"] is not None:
        raise InputError(f"{where} must be a dense model: it has a [moe] section")
    d_ff = sections["model"]["d_ff"]
    sections = {**sections, "moe": {"num_experts": num_experts, "top_k": top_k, "d_ff": d_ff}}
    sections["model"] = {
        **sections["model"], "first_k_dense": first_k_dense, "d_ff": d_ff if first_k_dense else 0,
    }  # fmt: skip
    spec = resolve_spec(sections, where, overrides)
    assert spec.moe is not None
    for field, value, rule in (
        ("d_ff", spec.moe.d_ff, d_ff),
        ("num_shared_experts", spec.moe.num_shared_experts, 0),
    ):
        if value != rule:
            raise InputError(f"moe.{field} ({value}) must be {rule}: experts are copies of a layer")
    return spec


class Widened:
    """A source whose hidden units are there ``copies`` times, side by side (Chen et al., arXiv
    1511.05641, section 2.2). The hidden units are those of the routed and the shared experts, or of
    a dense model's layers.

    Each copy of a unit gets 1/N of the unit's row of w_down. With ``noise`` the shares differ by
    normal numbers of standard deviation ``noise`` / N that sum to 0: the output does not change,
    and the copies get different gradients.

    Raises InputError where w_down has a dtype that cannot be divided.
    """

    def __init__(self, source: Source, info: SourceInfo, copies: int, noise: float) -> None:
        self.source, self.info, self.copies, self.noise = source, info, copies, noise
        dense = info.spec["moe"] is None
        self._rooms = ("ffn",) if dense else ("moe/experts", "moe/shared_experts")
        self.arrays = dict(source.arrays)
        for name, array in source.arrays.items():
            dim = self._hidden_dim(name)
            if dim is not None:
                shape = list(array.shape)
                shape[dim] *= copies
                self.arrays[name] = replace(array, shape=tuple(shape))
            if self._is_shared_out(name) and array.logical_dtype not in FLOATS:
                raise InputError(
                    f"surgery widen: {name} has dtype {array.logical_dtype}; one of "
                    f"{', '.join(FLOATS)} is needed"
                )

    def read_box(self, name: str, box: Box) -> Values:
        """See :class:`ckpt.rewrite.Source`."""
        dim = self._hidden_dim(name)
        if dim is None:
            return self.source.read_box(name, box)
        start, stop = box[dim]
        old = (start // self.copies, -(-stop // self.copies))
        values = self.source.read_box(name, (*box[:dim], old, *box[dim + 1 :]))
        values = np.take(values, np.arange(start, stop) // self.copies - old[0], axis=dim)
        if not self._is_shared_out(name):
            return values
        dtype = self.arrays[name].logical_dtype
        wide = values if dtype == "float64" else to_float32(values, dtype)
        shares = self._shares(name, box, dim).astype(wide.dtype)
        return convert(wide * shares, wide.dtype.name, dtype)

    def _hidden_dim(self, name: str) -> int | None:
        """The dim of an array that is F and is widened; None where there is none."""
        matrix = feed_forward(name)
        if matrix is None or matrix.room not in self._rooms:
            return None
        network, kind, which = matrix
        if kind == "b":
            return None if which == "down" else 2 if network == "moe/experts" else 1
        if network == "moe/experts":  # [L, E, D, F], and [L, E, F, D]
            return 2 if which == "down" else 3
        return 2 if which == "down" else 1  # [L, F, D], and [L, D, F]

    def _is_shared_out(self, name: str) -> bool:
        matrix = feed_forward(name)
        return matrix is not None and matrix.room in self._rooms and matrix[1:] == ("w", "down")

    def _shares(self, name: str, box: Box, dim: int) -> Values:
        """The factor of each number of a box of w_down, of as many dims. A unit's factor does not
        depend on the box."""
        lead = box[:2] if "/experts/" in name else box[:1]
        sizes = [1] * len(box)
        sizes[: len(lead)] = box_shape(lead)
        sizes[dim] = box[dim][1] - box[dim][0]
        shares = np.full(sizes, 1 / self.copies)
        if self.noise:
            units = self.source.arrays[name].shape[dim]
            network = self._rooms.index(feed_forward(name).room)  # type: ignore[union-attr]
            for index in np.ndindex(*sizes[: len(lead)]):
                position = [start + i for (start, _), i in zip(lead, index, strict=True)]
                drawn_FN = np.random.default_rng([network, *position]).standard_normal(
                    (units, self.copies)
                )
                drawn_FN -= drawn_FN.mean(axis=1, keepdims=True)
                noise = drawn_FN.reshape(-1)[slice(*box[dim])] * self.noise / self.copies
                shares[index] += noise.reshape(shares[index].shape)
        return shares


def widened_sections(sections: dict[str, Any], copies: int) -> dict[str, Any]:
    """The sections of the spec of the widened model."""
    section = "model" if sections["moe"] is None else "moe"
    d_ff = sections[section]["d_ff"]
    return {**sections, section: {**sections[section], "d_ff": copies * d_ff}}
