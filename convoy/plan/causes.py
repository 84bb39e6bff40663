"""What can fail, how often, and what a failure takes away."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Nature = Literal["restart", "reboot", "replace"]
"""What a failure needs: the processes start again, the node boots again, or another node takes the
failed node's place."""
Detection = Literal["crash", "hang", "silent"]
"""How a failure shows: a process ends, a collective does not end, or numbers are wrong."""

CONFIG = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Cause(BaseModel):
    """One cause of failures, ``[failures.causes.NAME]``: a Poisson process."""

    model_config = CONFIG

    per_gpu_hour: float | None = Field(default=None, ge=0, le=1)
    """Failures of one GPU in an hour."""
    per_node_hour: float | None = Field(default=None, ge=0, le=10)
    """Failures of one node in an hour; in place of ``per_gpu_hour``."""
    nature: Nature
    """What the failure needs: ``restart`` of the processes, ``reboot`` of the node, or ``replace``:
    another node."""
    detection: Detection
    """How the failure shows: ``crash`` (a process ends), ``hang`` (a collective does not end), or
    ``silent`` (numbers are wrong, and a check finds out later)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.per_gpu_hour is None) == (self.per_node_hour is None):
            raise ValueError(
                f"a cause has one rate: per_gpu_hour ({self.per_gpu_hour}) or per_node_hour "
                f"({self.per_node_hour})"
            )
        return self

    def per_hour(self, gpus: int, nodes: int) -> float:
        """Failures in an hour of ``gpus`` GPUs in ``nodes`` nodes."""
        return (self.per_gpu_hour or 0.0) * gpus + (self.per_node_hour or 0.0) * nodes
