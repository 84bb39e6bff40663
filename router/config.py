"""The options of a router: the routing fields of the ``[moe]`` section of a job spec."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from router.config_errors import OneLineErrors
from router.kinds import OpenKind, Traits, fields_of_others

ScoreFunc = Literal["softmax", "sigmoid", "sqrtsoftplus"]
DropPolicy = Literal["reroute", "probs", "position"]

LEAST_ROWS = 32
"""A function of fewer rows is computed with this many; see :mod:`router.few_rows`. Rows of any
length then fill vectors."""
_MODEL = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class RoutingTraits(Traits):
    """What rules between options ask of a routing."""

    experts_choose: bool = False
    """Experts choose tokens, and take no more than they choose: a token has a place for each
    expert, most of them empty, and no capacity applies."""
    takes_biases: bool = False
    """The choice heeds ``expert_bias``."""
    takes_groups: bool = False
    """The choice heeds ``n_groups``."""
    top_k_in_evaluation: bool = False
    """In evaluation each token takes its ``top_k`` best experts, whatever other tokens there
    are."""


ROUTINGS = {
    "top_k": RoutingTraits("router.routing_top_k:TopK", takes_biases=True, takes_groups=True,
                           top_k_in_evaluation=True),
    "expert_choice": RoutingTraits("router.routing_expert_choice:ExpertChoice",
                                   experts_choose=True),
    "sinkhorn": RoutingTraits("router.routing_sinkhorn:Sinkhorn", top_k_in_evaluation=True),
    "force_load_balance": RoutingTraits("router.routing_force_load_balance:ForceLoadBalance"),
}  # fmt: skip
"""The routings of this repository, one line each."""

ROUTING = OpenKind("moe.routing", "Routing of package router", ROUTINGS)


@dataclass(frozen=True)
class BalancingTraits(Traits):
    """What rules between options ask of a balancing rule."""

    margin_bins: int = 0
    """The rule moves biases by a histogram of so many bins for each expert, and not by the loads
    of experts; 0 for a rule that needs the loads alone."""


BALANCINGS = {
    "standard": BalancingTraits("router.balancing:StandardBalancing"),
    "quantile": BalancingTraits("router.balancing_quantile:QuantileBalancing", margin_bins=192),
}
"""The balancing rules of this repository, one line each."""

BALANCING = OpenKind("moe.balancing", "Balancing of package router", BALANCINGS)


@dataclass(frozen=True)
class CapacityTraits(Traits):
    """What rules between options ask of a capacity policy."""

    bounded: bool = True
    """An assignment may be moved to another expert, or dropped."""
    depends_on_ranks: bool = True
    """Which assignments these are depends on the number of ranks."""
    lossless_with_copies: bool = False
    """Where copies of experts compute what is too much for a rank, no assignment is moved or
    dropped."""

    @property
    def with_copies(self) -> CapacityTraits:
        """The traits where copies of experts balance ranks."""
        if not self.lossless_with_copies:
            return self
        return replace(self, bounded=False, depends_on_ranks=False)


CAPACITIES = {
    "dropless": CapacityTraits("router.capacity_dropless:Dropless", bounded=False,
                               depends_on_ranks=False),
    "fixed": CapacityTraits("router.capacity_fixed:FixedCapacity", depends_on_ranks=False),
    "straggler_aware": CapacityTraits("router.capacity_straggler_aware:StragglerAwareCapacity",
                                      lossless_with_copies=True),
}  # fmt: skip
"""The capacity policies of this repository, one line each, and a config model below."""

CAPACITY = OpenKind("moe.capacity.policy", "CapacityPolicy of package router", CAPACITIES)


class _Policy(BaseModel, metaclass=OneLineErrors):
    """What the options of all capacity policies have."""

    model_config = _MODEL
    on_resume: ClassVar[dict[str, str]] = {"*": "fixed"}

    @property
    def traits(self) -> CapacityTraits:
        """What other rules may ask of the policy."""
        policy: str = vars(self)["policy"]
        return CAPACITY.traits(policy)


class DroplessConfig(_Policy):
    """No expert has a capacity: every chosen assignment is computed."""

    policy: Literal["dropless"] = "dropless"
    """Names this variant."""
    max_tokens_per_rank: int = Field(default=0, ge=0)
    """The most assignments that the experts of one rank compute in one call; 0 sets no bound. What
    exceeds the bound goes to next-best experts of other ranks, and is dropped where no rank has
    room."""

    @property
    def traits(self) -> CapacityTraits:
        """What other rules may ask of the policy: a bound on ranks is a capacity."""
        bounded = self.max_tokens_per_rank > 0
        return replace(super().traits, bounded=bounded, depends_on_ranks=bounded)


class FixedCapacityConfig(_Policy):
    """Every expert has the same capacity (GShard, Lepikhin et al., arXiv 2006.16668)."""

    policy: Literal["fixed"] = "fixed"
    """Names this variant."""
    capacity_factor: float = Field(default=1.25, gt=0)
    """One expert takes at most ceil(T·K / E · capacity_factor) of the T tokens of a call, with
    K = ``top_k`` and E = ``num_experts``."""
    drop_policy: DropPolicy = "reroute"
    """What happens to assignments beyond an expert's capacity. ``reroute``: each goes to the
    token's next-best expert with room. ``probs``: the assignments with the lowest scores are
    dropped. ``position``: the assignments of the last tokens are dropped."""


class StragglerAwareConfig(_Policy):
    """Each rank has a capacity in proportion to its measured speed; what is over is rerouted."""

    on_resume: ClassVar[dict[str, str]] = {
        "hysteresis": "free", "replay_log": "free", "*": "fixed",
    }  # fmt: skip

    policy: Literal["straggler_aware"] = "straggler_aware"
    """Names this variant."""
    capacity_factor: float = Field(default=1.25, ge=1)
    """The experts of a rank with a share of 1 take at most ceil(T·K / E · capacity_factor) of the T
    tokens of a call each, with K = ``top_k`` and E = ``num_experts``."""
    floor: float = Field(default=0.25, ge=0.01, le=1)
    """The least share of a rank; the mean share is 1."""
    ceiling: float = Field(default=2.0, ge=1)
    """The greatest share of a rank; the mean share is 1."""
    hysteresis: float = Field(default=0.1, ge=0)
    """The least relative change of a rank's speed that leads to a new plan. Noise leads to a new
    plan once in a million steps, and the first two steps of a process do not count."""
    replay_log: str | None = None
    """The log.jsonl of an earlier run: its capacity plans are used, and measured speeds are not."""


class OtherCapacityConfig(_Policy):
    """A policy from outside this repository, with the options that its class declares.

    The class derives from ``router.CapacityPolicy``; its ``Options``, a pydantic model, are the
    other fields of this table.
    """

    model_config = _MODEL | {"extra": "allow"}

    policy: Annotated[str, AfterValidator(CAPACITY.check)] = CAPACITY.names[-1]
    """The class."""

    @property
    def options(self) -> BaseModel:
        """The other fields of the table, as the class's ``Options``. Raises ValueError, one line,
        for options that the class refuses."""
        declared: BaseModel = CAPACITY.load(self.policy).Options(**(self.model_extra or {}))
        return declared

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        try:
            _ = self.options
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(["moe.capacity", *map(str, first["loc"])])
            raise ValueError(f"{field} ({first['input']!r}): {first['msg']}") from None
        return self


def policy(capacity: Any) -> str:
    """Which variant a table or a config of a capacity is; named as the field that says so."""
    if not isinstance(capacity, dict | _Policy):
        return "dropless"  # which says that it is no table
    name = capacity.get("policy") if isinstance(capacity, dict) else vars(capacity)["policy"]
    return name if isinstance(name, str) and name in CAPACITIES else CAPACITY.names[-1]


CapacityConfig = Annotated[
    Annotated[DroplessConfig, Tag("dropless")]
    | Annotated[FixedCapacityConfig, Tag("fixed")]
    | Annotated[StragglerAwareConfig, Tag("straggler_aware")]
    | Annotated[OtherCapacityConfig, Tag(CAPACITY.names[-1])],
    Field(discriminator=Discriminator(policy)),
]
"""The capacity of experts and ranks, one variant for each ``policy``."""

_VARIANTS: dict[str, type[BaseModel]] = {
    "dropless": DroplessConfig,
    "fixed": FixedCapacityConfig,
    "straggler_aware": StragglerAwareConfig,
}


class RouterConfig(BaseModel, metaclass=OneLineErrors):
    """Scores, choice of experts, capacity, and the auxiliary losses of one router.

    Raises ValueError, one line, for fields that do not fit together.
    """

    model_config = _MODEL
    on_resume: ClassVar[dict[str, str]] = {
        "input_jitter": "free", "bias_update_rate": "free", "aux_loss_coeff": "free",
        "aux_loss_scope": "free", "seq_aux_loss_coeff": "free", "z_loss_coeff": "free",
        "*": "fixed",
    }  # fmt: skip
    """Whether a resume of a run may change a field: ``free``, ``fixed`` or ``fixed if exact``."""

    num_experts: int = Field(ge=1)
    """The number of routed experts of one layer (E)."""
    top_k: int = Field(ge=1)
    """The number of experts that each token chooses (K)."""

    score_func: ScoreFunc = "softmax"
    """Makes scores of logits: a softmax over all experts, a sigmoid of each logit (DeepSeek-V3,
    arXiv 2412.19437, eq. 15), or sqrt(log(1 + exp(logit))) of each (DeepSeek-V4)."""
    router_bias: bool = False
    """Add a learned bias to the logit of each expert, in the choice and in the weights
    (gpt-oss)."""
    softmax_after_topk: bool = False
    """Take the softmax over the chosen logits of a token (Mixtral), and not over all logits. With
    ``top_k`` 1 the weight is then 1, and the router learns from auxiliary losses only."""
    norm_topk_prob: bool = True
    """Scale the weights of a token's chosen experts to a sum of 1."""
    route_scale: float = Field(default=1.0, gt=0)
    """A factor on the weights, applied after ``norm_topk_prob``."""
    input_jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, multiply the router's input by uniform random numbers between 1 - input_jitter
    and 1 + input_jitter (Fedus et al., arXiv 2101.03961, section 2.2)."""

    routing: Annotated[str, AfterValidator(ROUTING.check), ROUTING] = "top_k"
    """How experts are chosen. ``top_k``: each token takes its highest scores. ``expert_choice``:
    each expert takes the ceil(T·K / E) tokens with the highest scores (Zhou et al.,
    arXiv 2202.09368). ``sinkhorn``: top_k after a balancing normalization within the micro-batch
    (Clark et al., arXiv 2202.01169). ``force_load_balance``: experts in turn, whatever the scores;
    for benchmarks only. Or a class derived from ``router.Routing``."""
    n_groups: int = Field(default=1, ge=1)
    """Equal blocks of experts, for example the experts of one node each (DeepSeek-V3,
    arXiv 2412.19437, section 2.1.2)."""
    topk_groups: int = Field(default=1, ge=1)
    """The number of groups that the experts of one token come from."""
    topk_per_group: int = Field(default=2, ge=1)
    """The score of a group is the sum of this many of its highest scores."""

    capacity: CapacityConfig = DroplessConfig()
    """The capacity of experts and ranks; a table whose ``policy`` names the variant."""

    balancing: Annotated[str, AfterValidator(BALANCING.check), BALANCING] = "standard"
    """What keeps experts evenly loaded. ``standard``: the options below. ``quantile``: each step
    sets each expert's bias so that every expert would have had an equal part of the step's tokens
    (Su, kexue.fm/archives/11619); ``expert_bias`` is then true and ``aux_loss_coeff`` 0 where the
    spec does not say. Or a class derived from ``router.Balancing``, with losses and bias steps of
    its own."""
    expert_bias: bool = False
    """Balance experts without a loss: a bias for each expert is added to the scores for the choice
    and not to the weights (Wang et al., arXiv 2408.15664)."""
    bias_update_rate: float = Field(default=0.001, ge=0)
    """The amount by which one step raises or lowers each bias; 0 freezes the biases. Of
    ``balancing`` quantile the steps have no rate."""
    aux_loss_coeff: float = Field(default=0.01, ge=0)
    """The coefficient of the load-balancing loss (Fedus et al., arXiv 2101.03961, eqs. 4-6)."""
    aux_loss_scope: Literal["micro_batch", "global_batch", "previous_step"] = "micro_batch"
    """The tokens that the load-balancing loss counts. ``micro_batch``: those of one call.
    ``global_batch``: those of all ranks and of the step's micro-batches so far (Qiu et al.,
    arXiv 2501.11873); the loss then depends on the micro-batch size and on the number of ranks.
    ``previous_step``: those of the whole step before, on all ranks; the loss then depends on
    neither."""
    seq_aux_loss_coeff: float = Field(default=0.0, ge=0)
    """The coefficient of the sequence-wise load-balancing loss (DeepSeek-V3, arXiv 2412.19437,
    eqs. 17-20)."""
    z_loss_coeff: float = Field(default=0.0, ge=0)
    """The coefficient of the router z-loss (Zoph et al., arXiv 2202.08906, eq. 5)."""

    @property
    def routing_traits(self) -> RoutingTraits:
        """What other rules may ask of the routing."""
        return ROUTING.traits(self.routing)

    @property
    def balancing_traits(self) -> BalancingTraits:
        """What other rules may ask of the balancing rule."""
        return BALANCING.traits(self.balancing)

    @property
    def moves_biases(self) -> bool:
        """Whether each step moves the biases of experts."""
        return bool(self.expert_bias and self.bias_update_rate)

    @property
    def max_experts_per_token(self) -> int:
        """K, or E where experts choose."""
        return self.num_experts if self.routing_traits.experts_choose else self.top_k

    @model_validator(mode="before")
    @classmethod
    def _balance_by_margins_alone(cls, fields: Any) -> Any:
        """Biases, and no loss, are the defaults of a rule that moves biases by margins."""
        name = fields.get("balancing") if isinstance(fields, dict) else None
        if not isinstance(name, str) or not BALANCING.traits(name).margin_bins:
            return fields
        return {"expert_bias": True, "aux_loss_coeff": 0.0, **fields}

    @field_validator("capacity", mode="before")
    @classmethod
    def _check_capacity_fields(cls, capacity: Any) -> Any:
        """Add the default policy, and name the policies of a field that the policy lacks."""
        if not isinstance(capacity, dict):
            return capacity
        policy = capacity.get("policy", "dropless")
        if isinstance(policy, str):
            CAPACITY.check(policy)
        for field, others in fields_of_others(capacity, policy, _VARIANTS):
            raise ValueError(
                f"moe.capacity.{field} ({capacity[field]}) must be left out with "
                f"moe.capacity.policy ({policy}); policy {' or '.join(others)} has it"
            )
        return {"policy": policy, **capacity}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_choice()
        self._check_groups()
        self._check_margins()
        return self

    def _check_margins(self) -> None:
        if not self.balancing_traits.margin_bins:
            return
        rates = (0.0, type(self).model_fields["bias_update_rate"].default)
        for wrong, field, must, why in (
            (not self.expert_bias, "expert_bias", "true", "the rule moves biases alone"),
            (self.bias_update_rate not in rates, "bias_update_rate", "left out, or 0 to freeze "
             "the biases", "the rule has no rate"),
            (self.n_groups > 1, "n_groups", "1", "experts of other groups have no margin"),
            (self.top_k == self.num_experts, "top_k", f"below moe.num_experts "
             f"({self.num_experts})", "every expert has every token"),
        ):  # fmt: skip
            if wrong:
                value = str(getattr(self, field)).lower()
                raise ValueError(
                    f"moe.{field} ({value}) must be {must} with moe.balancing "
                    f"({self.balancing}): {why}"
                )

    def _check_choice(self) -> None:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"moe.top_k ({self.top_k}) must be at most moe.num_experts ({self.num_experts})"
            )
        if self.top_k == 1 and self.norm_topk_prob:
            raise ValueError(
                "moe.norm_topk_prob (true) must be false with moe.top_k (1): every weight would be "
                "1 and the router would get no gradient from the model's loss"
            )
        if self.softmax_after_topk and self.score_func != "softmax":
            raise ValueError(
                f"moe.softmax_after_topk (true) must be false with moe.score_func "
                f"({self.score_func})"
            )
        traits = self.routing_traits
        if traits.experts_choose and self.softmax_after_topk:
            raise ValueError(
                f"moe.softmax_after_topk (true) must be false with moe.routing ({self.routing})"
            )
        ordinary = (0.0, type(self).model_fields["bias_update_rate"].default)
        if not self.expert_bias and self.bias_update_rate not in ordinary:
            raise ValueError(
                f"moe.expert_bias (false) must be true with moe.bias_update_rate "
                f"({self.bias_update_rate}): there are no biases to update"
            )
        names = []
        if self.expert_bias and not traits.takes_biases:
            is_quantile = self.balancing == "quantile"
            names.append("moe.balancing (quantile)" if is_quantile else "moe.expert_bias (true)")
        if self.n_groups > 1 and not traits.takes_groups:
            names.append(f"moe.n_groups ({self.n_groups})")
        if names:
            raise ValueError(
                f"moe.routing ({self.routing}) must be top_k with {' and '.join(names)}"
            )
        if traits.experts_choose and self.capacity.traits.bounded:
            bound = getattr(self.capacity, "max_tokens_per_rank", 0)
            raise ValueError(
                f"moe.capacity.policy ({self.capacity.policy}) must be dropless, and "
                f"moe.capacity.max_tokens_per_rank ({bound}) 0, with moe.routing "
                f"({self.routing}): experts take no more than they choose"
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
