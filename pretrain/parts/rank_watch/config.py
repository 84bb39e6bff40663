"""The ``[detection]`` section of the spec."""

from __future__ import annotations

from pydantic import Field

from pretrain.section import OnResume, Section


class DetectionConfig(Section):
    """The ``[detection]`` section: how a run notices ranks that are stuck, and odd ranks."""

    on_resume = OnResume.FREE

    stuck_seconds: float = Field(default=30.0, gt=0, le=1e6)
    """A rank is reported as stuck where it has not moved for longer than its own history lets
    expect, and for at least so many seconds; at most half of ``train.timeout_seconds`` counts."""
    end_stuck_run: bool = False
    """End the processes of stuck ranks, so that the run ends with exit code 1 and torchrun starts
    it again. By default a stuck rank is only reported, and a collective's time-out ends the run."""
