"""The learning rate over the steps."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, model_validator

from pretrain.section import OnResume, Section


class ScheduleConfig(Section):
    """The ``[schedule]`` section: the learning rate over the steps."""

    on_resume = OnResume.FREE

    kind: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """How the learning rate falls after the warm-up. ``cosine``: along half a cosine (Loshchilov
    and Hutter, arXiv 1608.03983). ``linear``: along a line. ``constant``: not at all. ``wsd``:
    along a line over the last ``decay_steps`` (Hu et al., arXiv 2404.06395)."""
    warmup_steps: int = Field(default=0, ge=0)
    """The first steps, over which the learning rate rises linearly to its peak."""
    decay_steps: int = Field(default=0, ge=0)
    """For ``wsd``: the last steps, over which the learning rate falls linearly."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """The learning rate at the end as a ratio to the peak; ``constant`` ignores this field."""

    @model_validator(mode="after")
    def _check(self) -> ScheduleConfig:
        if (self.kind == "wsd") != (self.decay_steps > 0):
            raise ValueError(
                f"schedule.decay_steps ({self.decay_steps}) must be above 0 for wsd and 0 for the "
                f"others; schedule.kind is {self.kind}"
            )
        return self

    def ratio(self, step: int, total_steps: int) -> float:
        """The learning rate of the update that makes step ``step + 1``, as a ratio to the peak.

        Linear from 1 / warmup_steps; then to min_lr_ratio at total_steps along half a cosine
        (Loshchilov and Hutter, arXiv 1608.03983, eq. 5) or a line, or 1 throughout, or 1 with a
        linear fall over the last decay_steps (Hu et al., arXiv 2404.06395, eq. 1).
        """
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        low = self.min_lr_ratio
        if self.kind == "constant":
            return 1.0
        if self.kind == "wsd":
            left = min(max(total_steps - step, 0) / self.decay_steps, 1.0)
            return low + (1 - low) * left
        progress = (step - self.warmup_steps) / max(total_steps - self.warmup_steps, 1)
        progress = min(progress, 1.0)
        if self.kind == "linear":
            return low + (1 - low) * (1 - progress)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress))
