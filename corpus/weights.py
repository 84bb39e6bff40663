"""Weights of a blend as whole numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

MOST_SAMPLES = 100_000
"""The longest period of a blend."""


def whole_weights(field: str, weights: Mapping[str, float]) -> dict[str, int]:
    """The smallest whole numbers in the proportions of ``weights``.

    Each period of a blend has as many samples as these numbers add up to. A decimal number means
    what it says: 0.1 and 0.2 are 1 and 2.

    Raises ValueError, naming ``field``, where a weight is not above 0, or where the numbers add up
    to more than :data:`MOST_SAMPLES`.
    """
    wrong = next((n for n, w in weights.items() if not (math.isfinite(w) and w > 0)), None)
    if wrong is not None:
        raise ValueError(f"{field}: the weight of {wrong} ({weights[wrong]}) must be above 0")
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    common = math.lcm(*(each.denominator for each in exact.values()))
    whole = {name: int(each * common) for name, each in exact.items()}
    divisor = math.gcd(*whole.values())
    whole = {name: each // divisor for name, each in whole.items()}
    if sum(whole.values()) > MOST_SAMPLES:
        shown = ", ".join(f"{name}={weight}" for name, weight in weights.items())
        raise ValueError(
            f"{field}: the weights ({shown}) must add up to at most {MOST_SAMPLES} as whole "
            f"numbers without a common divisor ({sum(whole.values())}); round them to 4 digits"
        )
    return whole
