"""The ``[verify]`` section of the spec."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from pretrain.section import OnResume, Section


class VerifyConfig(Section):
    """The ``[verify]`` section: the search for silent data corruption.

    A broken processor or memory can give wrong numbers without any error. Two checks look for wrong
    numbers, and ``on_mismatch`` says what is done about them.
    """

    on_resume = OnResume.FREE

    parameters_interval_steps: Literal["save"] | int = "save"
    """Steps between two comparisons of parameters and moments among replicas. ``save`` compares
    before every save, and so does every number above 0: no checkpoint holds a state in which
    replicas differ. 0 compares never. With ``parallel.dp_replicate`` 1 there is nothing to
    compare."""
    gradients_interval_steps: int = Field(default=0, ge=0)
    """Steps between two repetitions of a step's gradients; 0 repeats nothing. Each replica computes
    the micro-batches of the next replica too, which costs about one forward and backward. With
    ``parallel.dp_replicate`` 1 each rank repeats its own micro-batches, which finds only faults
    that come and go. Needs kernels that give equal bits when repeated."""
    on_mismatch: Literal["stop", "report"] = "stop"
    """``stop``: the run ends with exit code 1, a machine that can be named is put on the exclude
    list, and the next start goes on from the newest verified checkpoint. ``report``: an event and
    a line, and training goes on."""

    @model_validator(mode="after")
    def _check(self) -> VerifyConfig:
        steps = self.parameters_interval_steps
        if isinstance(steps, int) and steps < 0:
            raise ValueError(
                f"verify.parameters_interval_steps ({steps}) must be at least 0, or save"
            )
        return self
