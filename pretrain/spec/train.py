"""The ``[train]`` and ``[eval]`` sections of the spec."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from pretrain.section import OnResume, Section


class TrainConfig(Section):
    """The ``[train]`` section: the length of the run and its loop."""

    on_resume = OnResume.FREE

    steps: int = Field(ge=1)
    """Optimizer steps of the whole run."""
    seed: Annotated[int, OnResume.FIXED] = Field(default=0, ge=0, lt=1 << 63)
    """The seed of initial weights, of the order of samples and of all random numbers."""
    compile: bool = False
    """Compile attention and dense layers with torch.compile, where no collective is inside them."""
    exact: Annotated[bool, OnResume.FIXED_IF_EXACT] = False
    """Compute the same numbers, bit for bit, whatever ``parallel.dp_shard``, ``dp_replicate``,
    ``ep`` and ``pp`` are, and whatever resizes the run went through; see docs/exact.md."""
    log_interval_steps: int = Field(default=10, ge=1)
    """Steps between two lines of the console."""
    timeout_seconds: float = Field(default=300.0, gt=0, le=1e6)
    """The run ends where a collective takes longer than this, in seconds."""
    time_limit_seconds: float | None = Field(default=None, gt=0)
    """Wall time of one start, in seconds since the process of rank 0 was started. The run commits a
    checkpoint and ends with exit code 75 before the limit. Under Slurm the end of the job, of which
    ``SLURM_JOB_END_TIME`` tells, is a limit too."""
    parts: list[str] = Field(default_factory=list)
    """Parts of a step that are no parts of Convoy, as ``package.module:Class``; see
    :class:`pretrain.parts.step.Part`."""


class EvalConfig(Section):
    """The ``[eval]`` section: evaluation on held-out sequences."""

    on_resume = OnResume.FREE

    interval_steps: int = Field(default=0, ge=0)
    """Steps between two evaluations, and the last step is evaluated too, before its checkpoint; 0
    evaluates only after the end of the run."""
    sequences: int = Field(default=128, ge=1)
    """Held-out sequences of one evaluation during training, of each validation set."""
    final_sequences: int = Field(default=4096, ge=1)
    """Held-out sequences of the evaluation after the last step, of each validation set; a set with
    fewer sequences is read whole."""
