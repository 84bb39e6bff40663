"""The ``[parallel]`` section of a job spec."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from parallel.gradient_compression import GradientCompression
from parallel.layout import Topology
from parallel.recompute import Recompute

PipelineSchedule = Literal["gpipe", "1f1b", "zbv", "dualpipev"]


class ParallelConfig(BaseModel):
    """Degrees of every parallel axis, and what FSDP keeps between forward and backward.

    ``dp_shard = -1`` takes the ranks that the other axes leave over. Attention and dense layers
    use ``pp x dp_replicate x dp_shard x cp x tp``; experts use the same ranks folded as
    ``efsdp x ep`` (arXiv 2504.14960, "parallel folding").
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pp: int = Field(default=1, ge=1)
    dp_replicate: int = Field(default=1, ge=1)
    dp_shard: int = Field(default=-1, ge=-1)
    cp: int = Field(default=1, ge=1)
    tp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    pp_schedule: PipelineSchedule = "1f1b"
    """All forwards before all backwards, or each backward as soon as may be (interleaved where
    ranks have several stages); or, with two stages on a rank that are as far from the pipeline's
    ends, ZB-V (Qi et al., arXiv 2401.10241, section 6) or DualPipeV (DeepSeek-V3, arXiv 2412.19437,
    and its code), where weights' gradients are computed while ranks would else wait."""
    pp_stages_per_rank: int = Field(default=1, ge=1)
    """Parts of the model on each pipeline rank: more wait less and send more."""
    tp_across_nodes: bool = False
    """Let tensor-parallel ranks be on several machines."""
    max_nodes_per_token: int = Field(default=0, ge=0)
    """Refuse machines on which a token may be sent to more nodes than this; 0 takes any."""
    zero: Literal[1, 2, 3] = 3
    """What is held in slices but while it is used (Rajbhandari et al., arXiv 1910.02054, section
    5): optimizer state; gradients too; parameters too. With 1, gradients are summed over ranks once
    a step, and not once a micro-batch."""
    gradient_compression: GradientCompression = "none"
    """Of sums over dp_replicate: float32; bfloat16; or one_bit, signs with error feedback."""
    prefetch: int = Field(default=0, ge=0)
    """Layers ahead whose parameters are gathered; 0 leaves it to FSDP."""
    offload_optimizer: bool = False
    """Keep slices of parameters, gradients and moments in host memory, and update them there."""
    offload_activations: bool = False
    """Keep in host memory what layers save for their backward."""

    recompute: Recompute = "none"
    """Of each layer's activations keep the input alone (full), or the results of products and of
    attention too (selective), and compute the rest again in the backward."""
    recompute_every: int = Field(default=1, ge=1)
    """Do so for the first of every so many layers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.recompute == "none" and self.recompute_every > 1:
            raise ValueError(
                f"parallel.recompute_every ({self.recompute_every}) must be 1 where "
                f"parallel.recompute is none"
            )
        if self.offload_activations and self.recompute == "selective":
            raise ValueError(
                "parallel.offload_activations (true) must be false with parallel.recompute "
                "(selective), which keeps what it keeps by itself; full or none go with it"
            )
        if self.gradient_compression != "none" and self.dp_replicate == 1:
            raise ValueError(
                f"parallel.gradient_compression ({self.gradient_compression}) must be none where "
                f"parallel.dp_replicate is 1: it is of sums over copies"
            )
        if self.pp == 1 and self.pp_stages_per_rank > 1:
            raise ValueError(
                f"parallel.pp_stages_per_rank ({self.pp_stages_per_rank}) must be 1 where "
                f"parallel.pp is 1"
            )
        if self.pp_schedule in ("zbv", "dualpipev"):
            if self.pp == 1:
                raise ValueError(
                    f"parallel.pp (1) must be at least 2 with parallel.pp_schedule "
                    f"({self.pp_schedule})"
                )
            if self.pp_stages_per_rank != 2:
                raise ValueError(
                    f"parallel.pp_stages_per_rank ({self.pp_stages_per_rank}) must be 2 with "
                    f"parallel.pp_schedule ({self.pp_schedule}): a rank has one stage of each arm "
                    f"of the V"
                )
        return self

    def topology(self, world: int) -> Topology:
        """Resolve to ``world`` ranks.

        Raises ValueError, naming the degrees, where they do not multiply to ``world``.
        """
        others = self.pp * self.dp_replicate * self.cp * self.tp
        dp_shard = self.dp_shard
        if dp_shard == 0:
            raise ValueError("parallel.dp_shard (0) must be -1 (the ranks left over) or at least 1")
        if dp_shard == -1:
            if world % others:
                raise ValueError(
                    f"world size ({world}) must be a multiple of pp x dp_replicate x cp x tp "
                    f"({self.pp} x {self.dp_replicate} x {self.cp} x {self.tp} = {others})"
                )
            dp_shard = world // others
        if dp_shard * others != world:
            raise ValueError(
                f"parallel degrees pp x dp_replicate x dp_shard x cp x tp "
                f"({self.pp} x {self.dp_replicate} x {dp_shard} x {self.cp} x {self.tp} = "
                f"{dp_shard * others}) must multiply to the world size ({world})"
            )
        return Topology(
            pp=self.pp,
            dp_replicate=self.dp_replicate,
            dp_shard=dp_shard,
            cp=self.cp,
            tp=self.tp,
            ep=self.ep,
        )
