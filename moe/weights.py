"""The parameters of a rank's experts, as the paths that compute them take them.

Legend: E experts held here, D d_model, F d_ff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class ExpertWeights(NamedTuple):
    """y = act(x w_gate + b_gate) * (x w_up + b_up) w_down + b_down, for each expert."""

    w_gate: Tensor | None
    """[E, D, F]; None where the activation has no gate."""
    w_up: Tensor
    """[E, D, F]."""
    w_down: Tensor
    """[E, F, D]."""
    b_gate: Tensor | None = None
    """[E, F]; the biases are there together or not at all."""
    b_up: Tensor | None = None
    """[E, F]."""
    b_down: Tensor | None = None
    """[E, D]."""

    def map(self, function: Callable[[Tensor], Tensor]) -> ExpertWeights:
        """The same of each that is there."""
        return ExpertWeights._make(None if p is None else function(p) for p in self)

    def of(self, expert: int) -> ExpertWeights:
        """One expert's."""
        return self.map(lambda p: p[expert])
