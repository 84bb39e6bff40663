"""The choices of a forward, kept for the forward that computes it again in the backward.

A device may break a tie of scores in another way when a layer is computed again, or round a logit
otherwise. Tokens would then have other experts in the backward than in the forward: buffers would
have other sizes on some rank, or gradients would be those of another function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from router.placement import Placement


class Choice(NamedTuple):
    """What a call of a router chose."""

    expert_indices_TK: Tensor
    """[T, K] int64, before capacity."""
    placement: Placement


class KeptChoices:
    """A context in which the calls of one router keep their choices, or take kept ones.

    Args:
        router: the router; its attribute ``kept_choices`` is this object within the context.
        choices: the choices of the first forward, in the order of its calls.
        again: whether calls take the choices, in their order, and do not make them.
    """

    def __init__(self, router: Any, choices: list[Choice], again: bool) -> None:
        self.router, self.choices, self.again = router, choices, again
        self._before: KeptChoices | None = None
        self._taken = 0

    def __enter__(self) -> None:
        # A graph that is kept is computed again at each of its backwards.
        self._taken = 0
        self._before, self.router.kept_choices = self.router.kept_choices, self

    def __exit__(self, *_: object) -> None:
        self.router.kept_choices = self._before

    def of_call(self, choose: Callable[[], Choice]) -> Choice:
        """The choice of the next call."""
        if not self.again:
            self.choices.append(choose())
            return self.choices[-1]
        self._taken += 1
        return self.choices[self._taken - 1]
