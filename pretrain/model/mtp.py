"""The ``[mtp]`` section: how much multi-token prediction weighs in the loss."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pretrain.section import OnResume, Section, check_order


class MTPStage(Section):
    """The ``[[mtp.stages]]`` tables: another weight from some tokens on."""

    on_resume = OnResume.FREE

    from_tokens: int = Field(ge=1)
    """The stage begins with the first step after this many target tokens of the run."""
    loss_weight: float = Field(ge=0)
    """The weight in the stage."""


class MTPConfig(Section):
    """The ``[mtp]`` section: the loss of multi-token prediction, where ``model.num_mtp_layers`` is
    above 0."""

    on_resume = OnResume.FREE

    loss_weight: float = Field(default=0.3, ge=0)
    """What the mean of the layers' losses is multiplied by before it is added to the loss
    (lambda in DeepSeek-V3, arXiv 2412.19437, equation 25)."""
    stages: list[MTPStage] = Field(default_factory=list)
    """Changes of the weight. DeepSeek-V3 had 0.3, and 0.1 after the first 10 T tokens (section
    4.2)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_order("mtp.stages", [stage.from_tokens for stage in self.stages])
        return self

    def weight_at(self, tokens: int) -> float:
        """The weight of the step before which the run has had so many target tokens."""
        begun = [stage.loss_weight for stage in self.stages if stage.from_tokens <= tokens]
        return begun[-1] if begun else self.loss_weight
