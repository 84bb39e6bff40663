"""The ``[[inject]]`` tables of the spec: faults on purpose."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pretrain.section import OnResume, Section

FaultKind = Literal[
    "kill", "hang", "slow", "drop_network", "disk_full", "nan_gradient", "flip_gradient_bit",
    "scale_gradient", "garbage_tokens",
]  # fmt: skip

_OF_KIND: dict[str, tuple[str, ...]] = {
    "factor": ("slow", "scale_gradient"),
    "duration_steps": ("slow", "disk_full"),
    "bit": ("flip_gradient_bit",),
}
"""The kinds that a field belongs to; the other fields belong to every kind."""


class FaultConfig(Section):
    """The ``[[inject]]`` tables: faults on purpose, to see what a run does about them.

    A fault happens once in a run, also where the run is started again.
    ``kill``: the rank gets SIGKILL. ``hang``: the rank sleeps for ever, outside of collectives.
    ``slow``: the rank's process stands still for a share of the time. ``drop_network``: the TCP
    connections of the rank are shut down. ``disk_full``: the rank's writer process can write no
    byte. ``nan_gradient``, ``flip_gradient_bit``: one value of the rank's gradient becomes NaN, or
    has one bit flipped. ``scale_gradient``: the rank's gradient is multiplied.
    ``garbage_tokens``: the rank's tokens of the step are random.
    """

    on_resume = OnResume.FREE

    kind: FaultKind
    """What happens."""
    step: int = Field(ge=1)
    """The step in which the fault happens; the first step is 1."""
    rank: int = Field(default=0, ge=0)
    """The rank to which the fault happens."""
    factor: float | None = Field(default=None, gt=1)
    """``slow``: a step of the rank takes this many times as long; 2 by default.
    ``scale_gradient``: the factor; 10000 by default."""
    duration_steps: int | None = Field(default=None, ge=1)
    """``slow``, ``disk_full``: the number of steps that the fault lasts; 10 by default."""
    bit: int | None = Field(default=None, ge=0, le=31)
    """``flip_gradient_bit``: the bit of the float32, 0 for the lowest; 30 by default, the highest
    of the exponent."""

    @model_validator(mode="after")
    def _check(self) -> FaultConfig:
        for field, kinds in _OF_KIND.items():
            value = getattr(self, field)
            if value is not None and self.kind not in kinds:
                raise ValueError(
                    f"inject.{field} ({value}) must be left out with inject.kind ({self.kind}); "
                    f"only {' and '.join(kinds)} {'has' if len(kinds) == 1 else 'have'} it"
                )
        return self

    @property
    def name(self) -> str:
        """A name for files and messages, different for different faults."""
        values = (self.factor, self.duration_steps, self.bit)
        extra = "".join(f"-{value:g}" for value in values if value is not None)
        return f"{self.kind}-step{self.step}-rank{self.rank}{extra}"
