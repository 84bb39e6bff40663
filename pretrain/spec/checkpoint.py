"""The ``[checkpoint]`` section of the spec."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    model_validator,
)

from ckpt.lifecycle import Retention


class CheckpointConfig(BaseModel):
    """The ``[checkpoint]`` section."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    path: str | None = None
    """A folder that every rank shares, or ``s3://BUCKET/PREFIX``; RUN_DIR/checkpoints where it is
    left out."""
    interval_steps: Literal["auto"] | int | None = None
    """100 where interval_minutes is left out too. ``auto`` weighs what a save costs against what a
    failure loses."""
    interval_minutes: float | None = Field(default=None, gt=0)
    keep: int = Field(default=2, ge=1)
    # Of ``path`` alone, as in ckpt.Retention.
    keep_every: int = Field(default=0, ge=0)
    keep_best: int = Field(default=0, ge=0)
    grace_seconds: float = Field(default=0.0, ge=0)
    compression: Literal["none", "zstd"] = "none"
    read_once: bool = False
    """Where dp_replicate makes copies of the model, read for one and send to the others, for a
    store that is slower than the network."""
    memory: bool = False
    """Keep the newest one in each node's memory too, which outlives a worker."""
    memory_path: str = "/dev/shm"
    peer: bool = False
    """Keep it in the next node's memory too, for when a whole node is lost."""
    linger_seconds: float = Field(default=600.0, ge=0)
    """How long a node's memory waits for a restart after a run has ended in an error."""
    local_path: str | None = None
    """A folder on a disk of each node's own, to keep checkpoints in too."""
    shared_every: int = Field(default=1, ge=1)
    """Of how many saves one goes to ``path``; the last of a run always does."""
    on_topology_change: Literal["abort", "reshard"] = "abort"
    """What a resume on other ranks does."""

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        steps, minutes = self.interval_steps, self.interval_minutes
        if steps is not None and minutes is not None:
            raise ValueError(
                f"checkpoint.interval_minutes ({minutes}) must be left out with "
                f"checkpoint.interval_steps ({steps})"
            )
        if isinstance(steps, int) and steps < 1:
            raise ValueError(f"checkpoint.interval_steps ({steps}) must be at least 1, or auto")
        if self.shared_every > 1 and not (self.memory or self.peer or self.local_path):
            raise ValueError(
                f"checkpoint.shared_every ({self.shared_every}) must be 1 without "
                f"checkpoint.memory or checkpoint.local_path: other saves would go nowhere"
            )
        return self

    @property
    def retention(self) -> Retention:
        """What stays in ``path``."""
        return Retention(
            keep=self.keep,
            keep_every=self.keep_every,
            keep_best=self.keep_best,
            grace_seconds=self.grace_seconds,
        )

    @property
    def steps_between(self) -> int | None:
        """Steps between saves; None where time is what counts."""
        if self.interval_minutes is not None or self.interval_steps == "auto":
            return None
        return 100 if self.interval_steps is None else self.interval_steps
