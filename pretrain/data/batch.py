"""The ``[batch]`` section of the spec: how many sequences one step takes."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from pretrain.section import OnResume, Section, check_order


class BatchSizeRampup(Section):
    """The ``[batch.batch_size_rampup]`` section: a global batch that grows at the start."""

    on_resume = OnResume.FIXED

    start: int = Field(ge=1)
    """Sequences of the first step."""
    tokens: int = Field(ge=1)
    """Target tokens over which the batch grows linearly to ``global_batch_size``."""


class BatchStage(Section):
    """The ``[[batch.stages]]`` tables: another global batch from some tokens on."""

    on_resume = OnResume.FREE

    from_tokens: int = Field(ge=1)
    """The stage begins with the first step after this many target tokens of the run."""
    global_batch_size: int = Field(ge=1, le=1 << 31)
    """Sequences of one step in the stage."""


class BatchConfig(Section):
    """The ``[batch]`` section: sequences of one step, and of one forward and backward."""

    on_resume = OnResume.FREE

    global_batch_size: Annotated[int, OnResume.FIXED] = Field(ge=1, le=1 << 31)
    """Sequences of one step, over all ranks; the number of ranks does not change this number."""
    micro_batch_size: Annotated[int, OnResume.FIXED_IF_EXACT] = Field(ge=1)
    """Sequences of one forward and backward on one rank."""
    batch_size_rampup: Annotated[BatchSizeRampup | None, OnResume.FIXED] = None
    """Start with a smaller global batch; without this table every step has ``global_batch_size``
    sequences."""
    stages: list[BatchStage] = Field(default_factory=list)
    """Changes of the global batch. A resume may add stages that begin later than its checkpoint."""

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
        starts = [stage.from_tokens for stage in self.stages]
        ramp_tokens = 0 if ramp is None else ramp.tokens
        check_order("batch.stages", starts, ramp_tokens, "batch.batch_size_rampup.tokens")
        for stage in self.stages:
            if self.micro_batch_size > stage.global_batch_size:
                raise ValueError(
                    f"batch.micro_batch_size ({self.micro_batch_size}) must be at most "
                    f"batch.stages.global_batch_size ({stage.global_batch_size})"
                )
        return self

    @property
    def largest(self) -> int:
        """The most sequences of a step of any stage."""
        return max([self.global_batch_size, *(each.global_batch_size for each in self.stages)])

    def begun_stages(self, tokens: int) -> list[BatchStage]:
        """The stages that begin before so many target tokens of the run."""
        return [stage for stage in self.stages if stage.from_tokens < tokens]

    def samples_of(self, steps: int, seq_len: int) -> int:
        """Sequences of the first steps together, where none is left out."""
        ramp = 0 if self.batch_size_rampup is None else self.batch_size_rampup.tokens
        changes = [ramp, *(stage.from_tokens for stage in self.stages)]
        samples = step = 0
        while step < steps and samples * seq_len < changes[-1]:
            samples += self.size_at(samples, seq_len)
            step += 1
        return samples + (steps - step) * self.size_at(samples, seq_len)

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
            begun = self.begun_stages(tokens + 1)
            return begun[-1].global_batch_size if begun else last
        grown = (last - ramp.start) * tokens // ramp.tokens
        return ramp.start + grown // self.micro_batch_size * self.micro_batch_size
