"""The weights of a tuned checkpoint with its adapters added to them.

Legend: L layers, E experts, D inputs of a matrix, F its outputs, r rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt import Location, Manifest
from ckpt.rewrite import CheckpointSource, Source, SourceArray, changed
from parallel.layout import Box
from pretrain.spec import stored_spec
from pretrain.tune import TuneConfig, is_adapter

Values = np.ndarray[Any, Any]


def merged_source(root: Location, manifest: Manifest) -> Source:
    """The arrays of a checkpoint, and where the run had adapters, the weights with them."""
    source = CheckpointSource(root, manifest)
    fields = stored_spec(manifest.spec).get("tune")
    tune = None if fields is None else TuneConfig.model_validate(fields)
    if tune is None or tune.lora is None:
        return source
    return Merged(source, tune.lora.alpha / tune.lora.rank)


class Merged:
    """A source without adapters: each weight W is W + scale · B A of its adapter, in float32.

    See :class:`moe.adapters.matrices.ExpertsAdapter` and ``MatrixAdapter`` for the shapes.
    """

    def __init__(self, source: Source, scale: float) -> None:
        self.source, self.scale = source, scale
        self.info = changed(source.info, ("merged", scale))
        self.arrays = {n: array for n, array in source.arrays.items() if not is_adapter(n)}

    def read_box(self, name: str, box: Box) -> Values:
        """See :class:`ckpt.rewrite.Source`."""
        values = self.source.read_box(name, box)
        pair = self._adapter(name)
        if pair is None:
            return values
        a, b = pair
        values = values.copy()
        for row, layer in enumerate(self._layers(self.source.arrays[name])[slice(*box[0])]):
            if layer in self._layers(self.source.arrays[a]):
                values[row] += self.scale * self._product(a, b, layer, box[1:])
        return values

    def _adapter(self, name: str) -> tuple[str, str] | None:
        """The names of the two arrays of a weight's adapter."""
        module, _, last = name.rpartition("/")
        if module.endswith("/moe/experts") and last.startswith("w_"):
            pair = f"{module}/lora/{last[2:]}_a", f"{module}/lora/{last[2:]}_b"
        else:
            pair = f"{module}/lora/a", f"{module}/lora/b"
        is_weight = last == "weight" or last.startswith("w_")
        return pair if is_weight and pair[0] in self.source.arrays else None

    @staticmethod
    def _layers(array: SourceArray) -> list[int]:
        return list(array.attributes["layers"])

    def _product(self, a: str, b: str, layer: int, box: Box) -> Values:
        """B A of one layer, the numbers of a box of the weight."""
        index = self._layers(self.source.arrays[a]).index(layer)
        row, every = (index, index + 1), (0, self.source.arrays[b].shape[-1])
        if len(box) == 3:  # experts: the weight is [E, D, F], a is [E, D, r], b is [E, F, r]
            a_EDr = self.source.read_box(a, (row, box[0], box[1], every))[0]
            b_EFr = self.source.read_box(b, (row, box[0], box[2], every))[0]
            return np.asarray(a_EDr @ b_EFr.transpose(0, 2, 1))
        a_rD = self.source.read_box(a, (row, every, box[1]))[0]
        b_Fr = self.source.read_box(b, (row, box[0], every))[0]
        return np.asarray(b_Fr @ a_rD)
