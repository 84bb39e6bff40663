"""The rules of retention."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field


class Retention(BaseModel):
    """The rules of retention; a checkpoint is kept where any of the rules keeps it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    on_resume: ClassVar[str] = "free"
    """Whether a resume of a run may change the fields."""

    keep: int = Field(default=2, ge=1)
    """The number of newest checkpoints that are kept."""
    keep_every: int = Field(default=0, ge=0)
    """Checkpoints whose step is a multiple of this are kept for ever; 0 keeps none."""
    keep_best: int = Field(default=0, ge=0)
    """The number of checkpoints with the lowest ``validation`` in their manifest's ``state`` that
    are kept."""
    grace_seconds: float = Field(default=0.0, ge=0)
    """Seconds that a checkpoint stays after the save that put the checkpoint beyond ``keep``."""
