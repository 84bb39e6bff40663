"""Statistics that a few wild values do not move."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation (Rousseeuw and
Croux, JASA 88, 1993, section 1)."""


def robust_scale(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the standard deviation that the median absolute deviation stands for."""
    middle = median(values)
    return middle, MAD_TO_SIGMA * median(abs(value - middle) for value in values)
