"""What decides who goes where: the routing fields of the ``[moe]`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

ScoreFunc = Literal["softmax", "sigmoid"]
CapacityName = Literal["dropless", "fixed", "straggler_aware"]
Selection = Literal["top_k", "expert_choice", "sinkhorn", "forced_balance"]


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
    """``expert_choice``: each expert takes the ceil(T·K / E) tokens that score highest for it;
    ``sinkhorn`` balances the choice within a micro-batch; ``forced_balance`` ignores the scores and
    is for benchmarks alone."""
    n_groups: int = Field(default=1, ge=1)
    """Experts in equal blocks: the experts of a node, say."""
    topk_groups: int = Field(default=1, ge=1)
    """A token's experts come from this many groups."""
    topk_per_group: int = Field(default=2, ge=1)
    """A group's score is the sum of its so many best."""

    capacity_policy: CapacityName = "dropless"
    capacity_factor: float = Field(default=1.25, gt=0)
    """``fixed``: an expert takes ceil(T·K / E · capacity_factor) of the T tokens of a call;
    ``straggler_aware``: the mean of what experts take is as much."""
    overflow: Literal["reroute", "drop_by_score", "drop_by_position"] = "reroute"
    max_received_rows: int = Field(default=0, ge=0)
    """``dropless``: the most assignments that a rank computes in a call; 0 is no bound."""
    rank_capacity_factor: float = Field(default=1.0, ge=1)
    """``straggler_aware``: what all ranks take together, as a multiple of T·K."""
    capacity_floor: float = Field(default=0.25, ge=0.01, le=1)
    """``straggler_aware``: the least share of a rank, 1 being the mean."""
    capacity_ceiling: float = Field(default=2.0, ge=1)
    """``straggler_aware``: the greatest share of a rank."""
    capacity_smoothing: float = Field(default=0.3, gt=0, le=1)
    """``straggler_aware``: the weight of the newest step in a rank's speed."""
    capacity_hysteresis: float = Field(default=0.05, ge=0)
    """``straggler_aware``: the change of some rank's share that is worth a new plan."""

    expert_bias: bool = False
    """Balance without a loss: a bias for each expert, added to the scores for the choice alone."""
    bias_update_rate: float = Field(default=0.001, ge=0)
    """What a step adds to or takes from each bias; 0 freezes them."""
    load_balance_weight: float = Field(default=0.01, ge=0)
    load_balance_scope: Literal["micro_batch", "global_batch"] = "micro_batch"
    """Whose tokens the loss's fractions count: those of a call on one rank, or of all ranks and of
    the step so far."""
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
        if self.selection == "expert_choice" and self.softmax_after_topk:
            raise ValueError(
                "moe.softmax_after_topk (true) must be false with moe.selection (expert_choice)"
            )
        if self.selection != "top_k" and (self.expert_bias or self.n_groups > 1):
            raise ValueError(
                f"moe.selection ({self.selection}) must be top_k with moe.expert_bias "
                f"({str(self.expert_bias).lower()}) or moe.n_groups ({self.n_groups})"
            )
        self._check_groups()
        self._check_capacity()
        return self

    def _check_capacity(self) -> None:
        policy = self.capacity_policy
        if policy == "dropless" and self.overflow != "reroute" and not self.max_received_rows:
            raise ValueError(
                f"moe.overflow ({self.overflow}) must be left out with moe.capacity_policy "
                f"(dropless), under which nothing is over; fixed has a capacity"
            )
        if self.selection == "expert_choice" and (policy != "dropless" or self.max_received_rows):
            raise ValueError(
                f"moe.capacity_policy ({policy}) must be dropless, and moe.max_received_rows "
                f"({self.max_received_rows}) 0, with moe.selection (expert_choice): experts take "
                f"no more than they choose"
            )
        if self.max_received_rows and policy != "dropless":
            raise ValueError(
                f"moe.max_received_rows ({self.max_received_rows}) must be 0 with "
                f"moe.capacity_policy ({policy}), which has bounds of its own"
            )
        if self.max_received_rows and self.overflow != "reroute":
            raise ValueError(
                f"moe.overflow ({self.overflow}) must be reroute with moe.max_received_rows "
                f"({self.max_received_rows})"
            )
        if policy == "straggler_aware" and self.capacity_factor < self.rank_capacity_factor:
            raise ValueError(
                f"moe.capacity_factor ({self.capacity_factor}) must be at least "
                f"moe.rank_capacity_factor ({self.rank_capacity_factor}): experts would be full "
                f"before their ranks"
            )
        if policy == "straggler_aware" and self.overflow != "reroute":
            raise ValueError(
                f"moe.overflow ({self.overflow}) must be reroute with moe.capacity_policy "
                f"(straggler_aware)"
            )

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
