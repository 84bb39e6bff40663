"""The loads of experts of a log interval, in few numbers.

A load is an expert's assignments over the mean of its layer's experts: 1 is even. A model has
thousands of experts, and a run millions of steps; neither may make metrics or the log grow with
them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_MOST_NUMBERS = 2048
"""Loads in a line of the log, where three layers have no more."""
_MOST_LAYERS = 7
_EVERY_INTERVAL = 512
"""Log intervals from the start of which each has loads in the log."""


def loads(tokens_per_expert: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """[L, E] loads of assignments [L, E]; those of a layer without any are 0."""
    if not tokens_per_expert:
        return np.zeros((0, 1))
    counts_LE = np.asarray(tokens_per_expert, np.float64)
    sums_L1 = counts_LE.sum(1, keepdims=True).clip(min=1)
    loads_LE: NDArray[np.float64] = counts_LE * counts_LE.shape[1] / sums_L1
    return loads_LE


def load_quantiles(loads_LE: NDArray[np.float64]) -> dict[str, float]:
    """The loads that a half, nine tenths and 99 % of all experts of all layers do not exceed, and
    the largest one; layers without an assignment are left out."""
    loads_N = loads_LE[loads_LE.any(1)].ravel()
    if not loads_N.size:
        return {}
    values = np.quantile(loads_N, list(QUANTILES.values()), method="inverted_cdf")
    return dict(zip(QUANTILES, values.tolist(), strict=True))


def logged_loads(
    loads_LE: NDArray[np.float64], layers: Sequence[int], interval: int
) -> dict[str, list[int]]:
    """The loads that the log has of an interval, in percent, by the number of the layer.

    Layers are the first, the middle and the last one, others between them at even distances, and
    the layer with the largest load of the interval. The first 512 intervals have loads, then every
    second one up to 1,024, every fourth one up to 2,048, and so on: their number grows with the
    logarithm of the steps.

    Args:
        loads_LE: of :func:`loads`.
        layers: numbers of the MoE layers.
        interval: the number of the interval, from 1.
    """
    if not layers or interval % _stride(interval):
        return {}
    num_layers, num_experts = loads_LE.shape
    most = max(3, min(_MOST_LAYERS, _MOST_NUMBERS // num_experts - 1))
    spaces = (most - 1) // 2 * 2  # even: a layer in the middle is among them
    chosen = {space * (num_layers - 1) // spaces for space in range(spaces + 1)}
    chosen.add(int(loads_LE.max(1).argmax()))
    percent_LE = (100 * loads_LE).round().astype(int)
    return {str(layers[index]): percent_LE[index].tolist() for index in sorted(chosen)}


def _stride(interval: int) -> int:
    """Of how many intervals one has loads in the log."""
    if interval < _EVERY_INTERVAL:
        return 1
    return 1 << 1 + int(math.log2(interval // _EVERY_INTERVAL))
