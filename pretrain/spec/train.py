"""The ``[train]`` section of the spec."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
)


class TrainConfig(BaseModel):
    """The ``[train]`` section."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    steps: int = Field(ge=1)
    global_batch_size: int = Field(ge=1, le=1 << 31)
    """Sequences of one step, over all ranks; never changed by the number of ranks."""
    ramp_batch_size: int = Field(default=0, ge=0)
    """Sequences of the first steps, where the batch grows; 0 where it does not."""
    ramp_tokens: int = Field(default=0, ge=0)
    """Target tokens over which it grows to global_batch_size."""
    micro_batch_size: int = Field(ge=1)
    """Sequences of one forward and backward on one rank."""
    init_from: str | None = None
    """A checkpoint folder, or ``s3://BUCKET/PREFIX``, of which the newest one's weights are the
    first values, with a fresh optimizer, at step 0."""
    init_rename: dict[str, str] = Field(default_factory=dict)
    """Names of arrays in the model by those in ``init_from``; both may be beginnings, with / at
    their ends."""
    init_missing: Literal["refuse", "keep"] = "refuse"
    """What becomes of parameters that ``init_from`` lacks; ``keep`` gives them fresh values."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Of products and of what travels between ranks; parameters, gradients' sums, moments, routers
    and the loss are in float32 either way."""
    loss_scale: int = 1 << 16
    """float16: what the loss is multiplied by before the first backward, a power of two, so that
    nothing is rounded; half as much is tried where gradients overflow."""
    loss_scale_growth_steps: int = Field(default=2000, ge=1)
    """float16: steps in a row without an overflow, after which the scale doubles."""
    compile: bool = False
    """Let torch.compile have attention and dense layers, where no collective is within them."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    log_interval_steps: int = Field(default=10, ge=1)
    eval_interval_steps: int = Field(default=0, ge=0)
    """0: only at the end."""
    eval_sequences: int = Field(default=128, ge=1)
    """Held-out sequences of an evaluation on the way; the last one reads them all."""
    max_skipped_steps: int = Field(default=3, ge=1)
    """Steps skipped in a row, for a loss or gradient that is not finite, before giving up."""
    replay_capacity_plans: str = ""
    """The log.jsonl of a run whose capacity plans are taken instead of measuring speeds."""
    timeout_seconds: float = Field(default=300.0, gt=0, le=1e6)
    """A collective that takes longer ends the run."""

    @field_validator("precision", mode="before")
    @classmethod
    def _check_precision(cls, value: Any) -> Any:
        if value == "float8":
            raise ValueError(
                "train.precision (float8) must be float32, bfloat16 or float16: products in float8 "
                "are not implemented, for any hardware"
            )
        return value

    @field_validator("loss_scale")
    @classmethod
    def _check_loss_scale(cls, value: int) -> int:
        # The largest power of two in float32, which the loss is in.
        if value.bit_count() != 1 or not 1 <= value <= 1 << 127:
            raise ValueError(
                f"train.loss_scale ({value}) must be a power of two from 1 to 2^127, as 65536 is: "
                f"gradients are divided by it, and nothing is to be rounded"
            )
        return value

    @property
    def dtype(self) -> torch.dtype:
        """That of products."""
        dtype: torch.dtype = getattr(torch, self.precision)
        return dtype

    @property
    def first_loss_scale(self) -> float | None:
        """Of a run's first step; None but in float16, which alone needs one."""
        return float(self.loss_scale) if self.precision == "float16" else None

    def batch_size(self, sample_index: int, seq_len: int) -> int:
        """Sequences of the step that begins at a sample index, on any number of ranks.

        Between ramp_batch_size and global_batch_size it grows with the tokens before, linearly, by
        whole micro-batches.
        """
        first, last = self.ramp_batch_size, self.global_batch_size
        tokens = sample_index * seq_len
        if not first or tokens >= self.ramp_tokens:
            return last
        grown = (last - first) * tokens // self.ramp_tokens
        return first + grown // self.micro_batch_size * self.micro_batch_size
