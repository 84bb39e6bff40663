"""What decides who goes where: the routing fields of the ``[moe]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

ScoreFunc = Literal["softmax", "sigmoid"]
Selection = Literal["top_k", "sinkhorn", "forced_balance"]


class RouterConfig(BaseModel):
    """Scores, selection, balancing and the auxiliary losses of one router.

    Raises ValidationError (a ValueError) for fields that do not fit together.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)

    score_func: ScoreFunc = "softmax"
    softmax_after_topk: bool = False
    """Take the softmax over a token's chosen logits (Mixtral), not over all of them."""
    renormalize: bool = True
    """Make a token's top_k weights sum to one."""
    route_scale: float = Field(default=1.0, gt=0)
    """Multiplies the weights, last."""
    router_dtype: Literal["float32", "float64"] = "float32"
    input_jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, multiply the router's input by uniform numbers in 1 - jitter to 1 + jitter."""

    selection: Selection = "top_k"
    """``sinkhorn`` balances the choice within a micro-batch; ``forced_balance`` ignores the scores
    and is for benchmarks alone."""
    n_groups: int = Field(default=1, ge=1)
    """Experts in equal blocks: the experts of a node, say."""
    topk_groups: int = Field(default=1, ge=1)
    """A token's experts come from this many groups."""
    topk_per_group: int = Field(default=2, ge=1)
    """A group's score is the sum of its so many best."""

    capacity_policy: Literal["dropless", "fixed"] = "dropless"
    capacity_factor: float = Field(default=1.25, gt=0)
    """``fixed``: an expert takes ceil(T·K / E · capacity_factor) of the T tokens of a call."""
    overflow: Literal["reroute", "drop_by_score", "drop_by_position"] = "reroute"

    expert_bias: bool = False
    """Balance without a loss: a bias for each expert, added to the scores for the choice alone."""
    bias_update_rate: float = Field(default=0.001, ge=0)
    """What a step adds to or takes from each bias; 0 freezes them."""
    load_balance_weight: float = Field(default=0.01, ge=0)
    sequence_balance_weight: float = Field(default=0.0, ge=0)
    z_loss_weight: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> RouterConfig:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"moe.top_k ({self.top_k}) must be at most moe.num_experts ({self.num_experts})"
            )
        if self.top_k == 1 and (self.renormalize or self.softmax_after_topk):
            field = "renormalize" if self.renormalize else "softmax_after_topk"
            raise ValueError(
                f"moe.{field} (true) must be false with moe.top_k (1): every weight would be 1 "
                f"and the router would get no gradient from the model's loss"
            )
        if self.softmax_after_topk and self.score_func != "softmax":
            raise ValueError(
                f"moe.softmax_after_topk (true) must be false with moe.score_func "
                f"({self.score_func})"
            )
        if self.selection != "top_k" and (self.expert_bias or self.n_groups > 1):
            raise ValueError(
                f"moe.selection ({self.selection}) must be top_k with moe.expert_bias "
                f"({str(self.expert_bias).lower()}) or moe.n_groups ({self.n_groups})"
            )
        self._check_groups()
        return self

    def _check_groups(self) -> None:
        if self.num_experts % self.n_groups:
            raise ValueError(
                f"moe.num_experts ({self.num_experts}) must be a multiple of moe.n_groups "
                f"({self.n_groups})"
            )
        size = self.num_experts // self.n_groups
        if self.topk_groups > self.n_groups:
            raise ValueError(
                f"moe.topk_groups ({self.topk_groups}) must be at most moe.n_groups "
                f"({self.n_groups})"
            )
        if self.n_groups > 1 and self.topk_per_group > size:
            raise ValueError(
                f"moe.topk_per_group ({self.topk_per_group}) must be at most the experts of a "
                f"group ({self.num_experts} / {self.n_groups} = {size})"
            )
        if self.top_k > self.topk_groups * size:
            raise ValueError(
                f"moe.top_k ({self.top_k}) must be at most the experts of moe.topk_groups "
                f"({self.topk_groups} x {size} = {self.topk_groups * size})"
            )
