"""The ``[batch]`` section of the spec: how many sequences one step takes."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_MODEL = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class BatchSizeRampup(BaseModel):
    """The ``[batch.batch_size_rampup]`` section: a global batch that grows at the start."""

    model_config = _MODEL

    start: int = Field(ge=1)
    """Sequences of the first step."""
    tokens: int = Field(ge=1)
    """Target tokens over which the batch grows linearly to ``global_batch_size``."""


class BatchConfig(BaseModel):
    """The ``[batch]`` section: sequences of one step, and of one forward and backward."""

    model_config = _MODEL

    global_batch_size: int = Field(ge=1, le=1 << 31)
    """Sequences of one step, over all ranks; the number of ranks does not change this number."""
    micro_batch_size: int = Field(ge=1)
    """Sequences of one forward and backward on one rank."""
    batch_size_rampup: BatchSizeRampup | None = None
    """Start with a smaller global batch; without this table every step has ``global_batch_size``
    sequences."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.micro_batch_size > self.global_batch_size:
            raise ValueError(
                f"batch.micro_batch_size ({self.micro_batch_size}) must be at most "
                f"batch.global_batch_size ({self.global_batch_size})"
            )
        ramp = self.batch_size_rampup
        if ramp is not None and ramp.start > self.global_batch_size:
            raise ValueError(
                f"batch.batch_size_rampup.start ({ramp.start}) must be at most "
                f"batch.global_batch_size ({self.global_batch_size})"
            )
        return self

    def size_at(self, sample_index: int, seq_len: int) -> int:
        """Sequences of the step that begins at a sample index, on any number of ranks.

        During the ramp-up the batch grows linearly with the tokens before this step, by whole
        micro-batches.

        Args:
            sample_index: the number of sequences of all earlier steps.
            seq_len: tokens of one sequence.
        """
        last, ramp = self.global_batch_size, self.batch_size_rampup
        tokens = sample_index * seq_len
        if ramp is None or tokens >= ramp.tokens:
            return last
        grown = (last - ramp.start) * tokens // ramp.tokens
        return ramp.start + grown // self.micro_batch_size * self.micro_batch_size
