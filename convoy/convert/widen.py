"""Wider feed-forwards with an unchanged output: every hidden unit is there several times.

Legend: L layers, E experts, D d_model, F d_ff, N copies of a hidden unit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ckpt.format import FLOATS, convert, to_float32
from ckpt.rewrite import Source, SourceInfo
from parallel.layout import Box, box_shape
from pretrain.errors import InputError
from pretrain.state import feed_forward

Values = np.ndarray[Any, Any]


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
        found = feed_forward(name)
        if found is None or found.room not in self._rooms:
            return None
        room, kind, which = found
        if kind == "b":
            return None if which == "down" else 2 if room == "moe/experts" else 1
        if room == "moe/experts":  # [L, E, D, F], and [L, E, F, D]
            return 2 if which == "down" else 3
        return 2 if which == "down" else 1  # [L, F, D], and [L, D, F]

    def _is_shared_out(self, name: str) -> bool:
        found = feed_forward(name)
        return found is not None and found.room in self._rooms and found[1:] == ("w", "down")

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
            room = self._rooms.index(feed_forward(name).room)  # type: ignore[union-attr]
            for place in np.ndindex(*sizes[: len(lead)]):
                at = [start + i for (start, _), i in zip(lead, place, strict=True)]
                drawn_FN = np.random.default_rng([room, *at]).standard_normal((units, self.copies))
                drawn_FN -= drawn_FN.mean(axis=1, keepdims=True)
                part = drawn_FN.reshape(-1)[slice(*box[dim])] * self.noise / self.copies
                shares[place] += part.reshape(shares[place].shape)
        return shares


def widened_sections(sections: dict[str, Any], copies: int) -> dict[str, Any]:
    """The sections of the spec of the widened model."""
    section = "model" if sections["moe"] is None else "moe"
    d_ff = sections[section]["d_ff"]
    return {**sections, section: {**sections[section], "d_ff": copies * d_ff}}
