"""The ``[stragglers]`` section of the spec."""

from __future__ import annotations

from pydantic import Field

from pretrain.section import OnResume, Section


class StragglersConfig(Section):
    """The ``[stragglers]`` section: ranks that are slow as a whole, in all of their computation."""

    on_resume = OnResume.FREE

    rebalance: bool = False
    """Give a slow rank fewer micro-batches of the global batch, where that makes the step shorter.
    Samples and their order do not change. The ranks that add up a gradient then depend on measured
    times, so two runs agree up to rounding only. Not with ``parallel.pp`` above 1."""
    min_slowdown: float = Field(default=0.1, ge=0.01)
    """The least relative change of a rank's speed that counts: 0.1 ignores a rank that takes less
    than 1.1 times as long as the others."""
    patience_steps: int = Field(default=50, ge=1)
    """A rank that is still slow after so many steps is reported for replacement."""
    replace: bool = False
    """Put the machine of a rank that is still slow after ``patience_steps`` on
    RUN_DIR/exclude.json, commit a checkpoint, and end with exit code 75: torchrun starts the ranks
    again without the machine, and a spare takes its place. Needs ``elastic.enabled``."""
