"""The ``[parallel]`` section of a job spec."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from parallel.layout import Topology

GradientCompression = Literal["none", "bfloat16", "one_bit"]
Recompute = Literal["none", "selective", "full"]


class Section(BaseModel):
    """A table of the spec: frozen, without unknown fields, and without NaN and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    on_resume: ClassVar[Mapping[str, str]] = {"*": "free"}
    """Whether a resume of a run may change a field, see :class:`pretrain.section.OnResume`."""


class PipelineSchedule(StrEnum):
    """The order of forwards and backwards in a pipeline."""

    GPIPE = "gpipe"
    """All forwards before all backwards (Huang et al., arXiv 1811.06965)."""
    ONE_F_ONE_B = "1f1b"
    """Each backward as early as possible, interleaved where ranks have several stages (Narayanan et
    al., arXiv 2104.04473)."""
    ZBV = "zbv"
    """ZB-V (Qi et al., arXiv 2401.10241, section 6)."""
    DUALPIPEV = "dualpipev"
    """DualPipeV (DeepSeek-V3, arXiv 2412.19437, and the DualPipe code)."""

    @property
    def folds_into_v(self) -> bool:
        """Whether the stages run along the ranks and back, so that the first rank has the first
        stage and the last, and weight gradients are computed in a backward pass of their own."""
        return self in (PipelineSchedule.ZBV, PipelineSchedule.DUALPIPEV)


class PipelineConfig(Section):
    """The ``[parallel.pipeline]`` section: for ``parallel.pp`` above 1, stages and their order."""

    schedule: PipelineSchedule = Field(default=PipelineSchedule.ONE_F_ONE_B, strict=False)
    """``gpipe``: all forwards before all backwards (Huang et al., arXiv 1811.06965). ``1f1b``: each
    backward as early as possible, interleaved where ranks have several stages (Narayanan et al.,
    arXiv 2104.04473). ``zbv`` (Qi et al., arXiv 2401.10241, section 6) and ``dualpipev``
    (DeepSeek-V3, arXiv 2412.19437, and the DualPipe code): two stages on each rank, in a V, and
    weight gradients that are computed while ranks would otherwise wait."""
    stages_per_rank: int = Field(default=1, ge=1)
    """The number of pipeline stages on each rank: more stages shorten the bubble and send more."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule.folds_into_v and self.stages_per_rank != 2:
            raise ValueError(
                f"parallel.pipeline.stages_per_rank ({self.stages_per_rank}) must be 2 with "
                f"parallel.pipeline.schedule ({self.schedule}): a rank has one stage of each arm "
                f"of the V"
            )
        return self


class MemoryConfig(Section):
    """The ``[parallel.memory]`` section: what is sharded, offloaded and recomputed."""

    zero_stage: Literal[1, 2, 3] = 3
    """What each rank keeps only a shard of between uses: 1 the optimizer state; 2 gradients too; 3
    parameters too (ZeRO, Rajbhandari et al., arXiv 1910.02054, section 5). With 1 and 2, parameters
    are gathered once a step, and with 3 each layer's twice a micro-batch. With 1, gradients are
    reduced once a step, and otherwise once a micro-batch."""
    offload_optimizer: bool = False
    """Keep the shards of parameters, gradients and moments in host memory, and run the optimizer
    there."""
    offload_activations: bool = False
    """Keep the activations that layers save for the backward in host memory."""
    recompute: Recompute = "none"
    """Activation recomputation (Chen et al., arXiv 1604.06174). ``full``: a layer keeps only its
    input. ``selective``: a layer also keeps the results of GEMMs and of attention (Korthikanti et
    al., arXiv 2205.05198)."""
    recompute_layer_freq: int = Field(default=1, ge=1)
    """Recompute the first of every so many layers."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.recompute == "none" and self.recompute_layer_freq > 1:
            raise ValueError(
                f"parallel.memory.recompute_layer_freq ({self.recompute_layer_freq}) must be 1 "
                f"where parallel.memory.recompute is none"
            )
        if self.offload_activations and self.recompute == "selective":
            raise ValueError(
                "parallel.memory.offload_activations (true) must be false with "
                "parallel.memory.recompute (selective), which chooses by itself what is kept; full "
                "or none go with offload_activations"
            )
        return self


class ParallelConfig(Section):
    """The ``[parallel]`` section: the degree of every parallel axis.

    Attention and dense layers use ``pp x dp_replicate x dp_shard x cp x tp`` ranks; experts use the
    same ranks folded as ``efsdp x ep`` (parallel folding, arXiv 2504.14960).
    """

    pp: int = Field(default=1, ge=1)
    """Pipeline-parallel degree."""
    dp_replicate: int = Field(default=1, ge=1)
    """The number of replicas of the sharded model (HSDP)."""
    dp_shard: int = Field(default=-1, ge=-1)
    """The number of ranks that shard one replica (FSDP); -1 takes the ranks that the other axes
    leave over."""
    cp: int = Field(default=1, ge=1)
    """Context-parallel degree: ranks that share a sequence in attention."""
    tp: int = Field(default=1, ge=1)
    """Tensor-parallel degree (Shoeybi et al., arXiv 1909.08053). With ``train.exact`` these
    ranks share sequences instead of GEMMs."""
    ep: int = Field(default=1, ge=1)
    """Expert-parallel degree: ranks that share the experts of a layer."""
    tp_across_nodes: bool = False
    """Allow tensor-parallel ranks on several nodes."""
    max_nodes_per_token: int = Field(default=0, ge=0)
    """Refuse to start where a token may be sent to more nodes than this; 0 allows any number."""
    gradient_compression: GradientCompression = "none"
    """How gradients are summed over ``dp_replicate``. ``none``: in float32. ``bfloat16``: with half
    the bytes. ``one_bit``: signs with error feedback (1-bit SGD, Seide et al., 2014)."""
    pipeline: PipelineConfig = PipelineConfig()
    """The pipeline's schedule and stages."""
    memory: MemoryConfig = MemoryConfig()
    """Sharding, offloading and recomputation."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gradient_compression != "none" and self.dp_replicate == 1:
            raise ValueError(
                f"parallel.gradient_compression ({self.gradient_compression}) must be none where "
                f"parallel.dp_replicate is 1: only sums over replicas are compressed"
            )
        schedule, stages = self.pipeline.schedule, self.pipeline.stages_per_rank
        if self.pp == 1 and schedule.folds_into_v:
            raise ValueError(
                f"parallel.pp (1) must be at least 2 with parallel.pipeline.schedule ({schedule})"
            )
        if self.pp == 1 and stages > 1:
            raise ValueError(
                f"parallel.pipeline.stages_per_rank ({stages}) must be 1 where parallel.pp is 1"
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
        try:
            return Topology(
                pp=self.pp,
                dp_replicate=self.dp_replicate,
                dp_shard=dp_shard,
                cp=self.cp,
                tp=self.tp,
                ep=self.ep,
            )
        except ValueError as error:
            text = str(error)
            raise ValueError(f"parallel.{text}" if text.startswith("ep ") else text) from None
