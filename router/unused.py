"""A warning for updates that a training loop must call and does not."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


class UnusedUpdate:
    """Warns once of an update that nobody calls: weights change from step to step without it.

    Under FSDP weights are gathered into memory that autograd does not count changes of: there is no
    warning then.
    """

    AFTER = 3
    """Changes of the weights, so that a weight which is set by hand is not taken for a step."""

    def __init__(self, option: str, update: str, otherwise: str = "") -> None:
        self.option, self.update, self.otherwise = option, update, otherwise
        self.steps: int | None = 0
        """None where the update has been called, or the warning has been given."""
        self._version: int | None = None

    def look(self, weight: Tensor) -> None:
        """Compare the weight with that of the last call, in a forward of training."""
        if self.steps is None or torch.compiler.is_compiling():
            return
        if self._version not in (None, weight._version):
            self.steps += 1
        self._version = weight._version
        if self.steps >= self.AFTER:
            steps, self.steps = self.steps, None
            warnings.warn(
                f"{self.option} has no effect, after {steps} optimizer steps: call "
                f"layer.router.{self.update} after each step{self.otherwise}",
                stacklevel=2,
            )
