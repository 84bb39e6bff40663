"""A mixture of experts made of a dense model: every expert is a copy of its layer's feed-forward.

Legend: L layers, E experts, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt.errors import CheckpointError
from ckpt.rewrite import Source, changed
from convoy.convert.weights import misfit, weight_arrays
from parallel.layout import Box, box_shape, whole_box, within
from pretrain.errors import InputError
from pretrain.model import first_matrix
from pretrain.spec import JobSpec, resolve_spec
from pretrain.state import EXPERT_BIAS, ROUTER, dense_name, in_decoder, parameter_name


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

    def read_box(self, name: str, box: Box) -> np.ndarray[Any, Any]:
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

    def _router(self, name: str, box: Box) -> np.ndarray[Any, Any]:
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
