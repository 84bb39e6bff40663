"""The parameters of a rank's experts, as the backends take them.

Legend: E experts of this rank, D d_model, F d_ff, L rank of adapters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class ExpertWeights(NamedTuple):
    """y = act(x w_gate + b_gate) * (x w_up + b_up) w_down + b_down, for each expert.

    A matrix with an adapter is w + a b^T: its product is x w + (x a) b^T, and no [D, F] is made of
    a and b (LoRA, arXiv 2106.09685, section 4.1). The scale of the adapter is a factor of b.
    """

    w_gate: Tensor | None
    """[E, D, F]; None where the activation has no gate."""
    w_up: Tensor
    """[E, D, F]."""
    w_down: Tensor
    """[E, F, D]."""
    b_gate: Tensor | None = None
    """[E, F]; None for experts without biases, and where the activation has no gate."""
    b_up: Tensor | None = None
    """[E, F]."""
    b_down: Tensor | None = None
    """[E, D]."""
    gate_a: Tensor | None = None
    """[E, D, L]; None for a matrix without an adapter."""
    gate_b: Tensor | None = None
    """[E, F, L]."""
    up_a: Tensor | None = None
    """[E, D, L]."""
    up_b: Tensor | None = None
    """[E, F, L]."""
    down_a: Tensor | None = None
    """[E, F, L]."""
    down_b: Tensor | None = None
    """[E, D, L]."""

    @property
    def num_base(self) -> int:
        """The number of fields that are not of adapters."""
        return self._fields.index("gate_a")

    @property
    def have_adapters(self) -> bool:
        """Whether a matrix has an adapter."""
        return any(tensor is not None for tensor in self[self.num_base :])

    def map(self, function: Callable[[Tensor], Tensor]) -> ExpertWeights:
        """Apply a function to each parameter that is not None."""
        return ExpertWeights._make(None if p is None else function(p) for p in self)

    def of(self, expert: int) -> ExpertWeights:
        """The parameters of one expert."""
        return self.map(lambda p: p[expert])

    def aligned(self, expert: int) -> ExpertWeights:
        """As :meth:`of`, each beginning at a cache line's start: copied where it does not. How a
        product of few rows rounds depends on that, and where an expert is in memory depends on the
        layout."""
        return self.of(expert).map(lambda p: p if p.data_ptr() % 64 == 0 else p.clone())
