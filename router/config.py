"""What decides who goes where: the routing fields of the ``[moe]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

ScoreFunc = Literal["softmax", "sigmoid"]


class RouterConfig(BaseModel):
    """Scores, selection and the auxiliary losses of one router.

    Raises ValidationError (a ValueError) for top_k above num_experts.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    score_func: ScoreFunc = "softmax"
    renormalize: bool = True
    """Make a token's top_k weights sum to one."""
    load_balance_weight: float = Field(default=0.01, ge=0.0)
    z_loss_weight: float = Field(default=0.0, ge=0.0)

    @model_validator(mode="after")
    def _check(self) -> RouterConfig:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"moe.top_k ({self.top_k}) must be at most moe.num_experts ({self.num_experts})"
            )
        if self.renormalize and self.top_k == 1:
            raise ValueError(
                "moe.renormalize (true) must be false with moe.top_k (1): every weight would be 1 "
                "and the router would get no gradient from the model's loss"
            )
        return self
