"""The arrays of a model's weights, and whether a source has them."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.rewrite import Source, SourceArray
from moe import MoEConfig
from parallel import Topology
from pretrain.model import ModelConfig, meta_decoder
from pretrain.parallelize import parameter_layouts
from pretrain.state import MODEL, model_arrays


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
    found = {name: array for name, array in source.arrays.items() if name.startswith(MODEL)}
    for name in sorted(wanted.keys() | found.keys()):
        has, needs = found.get(name), wanted.get(name)
        if has is None or needs is None or has.shape != needs.shape:
            shapes = [None if array is None else array.shape for array in (has, needs)]
            return f"{name} has shape {shapes[0]} but {whose} needs {shapes[1]}"
        layers = [array.attributes.get("layers") for array in (has, needs)]
        if layers[0] != layers[1]:
            return f"{name} has layers {layers[0]} but {whose} needs {layers[1]}"
    return None
