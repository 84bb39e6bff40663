"""What a plan is made for: a model, a layout, a batch, and how the training program works."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from convoy.plan.hardware import BYTES, DtypeName
from convoy.plan.loads import GroupLoads, LoadProfile
from convoy.plan.shape import ModelShape, flops
from parallel import PipelineSchedule
from parallel.layout import Topology
from pretrain.optim import AdamWConfig, OptimizerFields
from pretrain.parallelize import FLOAT8_COST, LayerCosts, divide_layers, place_of

Recompute = Literal["none", "selective", "full"]
ScheduleName = Literal["gpipe", "1f1b", "zbv", "dualpipev"]


@dataclass(frozen=True)
class Program:
    """How the program that trains works, where programs differ. The defaults are Convoy's."""

    dtype: DtypeName = "bfloat16"
    """Of GEMMs and of activations; of GEMMs alone where it is float8."""
    router_dtype: DtypeName = "float32"
    parameter_bytes: int = 4
    """Of a stored weight."""
    gradient_bytes: int = 4
    """Of a gradient, stored and on its way to other ranks."""
    moment_bytes: int = 4
    """Of each moment that the optimizer keeps of a parameter."""
    loss_dtype: DtypeName | None = None
    """Of the logits as the loss takes them, all at once; None: a chunk at a time in float32."""
    fused_attention: bool = True
    """Scores never reach the memory (FlashAttention)."""
    fused_elementwise: bool = False
    """Chains of element-wise operations are one kernel each, as a compiler makes them."""
    hides_data_parallel: bool = True
    """FSDP's gathers and reductions run during computation."""
    hides_dispatch: float = 0.0
    """The share of the all-to-all that can run during computation: 1 where forwards and backwards
    of two micro-batches are computed at once (DualPipe)."""
    hides_stages: bool = False
    """Activations travel between stages during computation."""
    sends_once_per_node: bool = False
    """A token crosses to a node once, however many of its experts are there (``hierarchical``)."""
    communication_units: int = 0
    """Tiles of a GEMM that are not computed, because their units move tokens instead."""
    dispatch_bytes: float = 0.0
    """Bytes of an element that travels to an expert in the forward; 0 takes the activations'."""
    experts_float8: bool = False
    """Routed experts are in float8, whatever ``dtype`` is: decides how layers are divided."""
    dense_float8: bool = False
    """The same of attention's projections, dense layers and shared experts."""
    optimizer: OptimizerFields = field(default_factory=lambda: AdamWConfig(lr=1.0))
    """Says what is kept of a parameter, and the products of its update."""

    @property
    def activation_bytes(self) -> int:
        """Bytes of an element of an activation."""
        return max(BYTES[self.dtype], 2)


@dataclass(frozen=True)
class Work:
    """One step's work, laid out over ranks."""

    shape: ModelShape
    topology: Topology
    seq_len: int
    global_batch_size: int
    """Sequences of a step."""
    micro_batch_size: int
    schedule: ScheduleName = "1f1b"
    stages_per_rank: int = 1
    zero_stage: int = 3
    recompute: Recompute = "none"
    recompute_layer_freq: int = 1
    imbalance: float = 1.0
    """Rows of the busiest rank's experts as a multiple of the mean."""
    capacity_factor: float = 0.0
    """Rows of an expert as a multiple of the mean, at most; 0 for no bound."""
    reroutes: bool = False
    """Whether rows beyond the capacity go to experts that have room; else they are dropped."""
    lossless_with_copies: bool = False
    """Whether the capacity bounds nothing where there are copies."""
    copies_refused: str = ""
    """Why the spec takes no copies, in one line; empty where it takes them."""
    loads: LoadProfile | None = None
    """The loads of experts, in place of ``imbalance``."""
    copies: int = 0
    """The most copies of other ranks' experts that a rank computes in one call: ``moe.copies``.
    Counts with ``loads``."""
    program: Program = field(default_factory=Program)

    @property
    def replicas(self) -> int:
        """Ranks that work on different sequences."""
        return self.topology.dp_replicate * self.topology.dp_shard

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches of a step on the rank with the most, as the schedule needs them."""
        count = -(-self.global_batch_size // (self.replicas * self.micro_batch_size))
        if self.topology.pp > 1:
            if self.schedule == "dualpipev":
                count = max(count, self.topology.pp * self.stages_per_rank)
            elif self.schedule == "1f1b" and self.stages_per_rank > 1:
                count = -(-count // self.topology.pp) * self.topology.pp
        return count

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch that a group of tensor-parallel ranks has."""
        return self.micro_batch_size * self.seq_len / self.topology.cp

    @property
    def local_tokens(self) -> float:
        """Tokens of a micro-batch that one rank has between GEMMs."""
        return self.tokens / self.topology.tp

    @property
    def group_loads(self) -> GroupLoads | None:
        """The loads of an expert group; None without ``loads``, and where every rank has all
        experts."""
        if self.loads is None or self.topology.ep == 1:
            return None
        bounds = not (self.copies and self.lossless_with_copies)
        factor = self.capacity_factor if bounds else 0.0
        return self.loads.of_group(self.topology.ep, self.copies, factor, self.reroutes)

    @property
    def busiest(self) -> float:
        """Rows of the busiest rank's experts as a multiple of the mean, capacity applied. With
        ``loads`` the mean over calls."""
        if self.topology.ep == 1:
            return 1.0  # every rank has all experts, and computes its own tokens
        if (group := self.group_loads) is not None:
            return group.hottest
        if self.capacity_factor:
            return min(self.imbalance, self.capacity_factor)
        return self.imbalance

    @property
    def busiest_in_layer(self) -> float:
        """The same in the call with the most rows, for the memory of one layer."""
        group = self.group_loads
        return self.busiest if group is None else group.hottest_call

    @property
    def busiest_in_stage(self) -> float:
        """The same in the mean over the layers of a rank, for what all of them keep."""
        group = self.group_loads
        if group is None:
            return self.busiest
        return group.hottest_stage(-(-self.shape.num_moe_layers // self.topology.pp))

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.topology.pp * (self.stages_per_rank if self.topology.pp > 1 else 1)

    @cached_property
    def stages(self) -> list[range]:
        """The layers of every stage."""
        return _stages(self._division)

    @cached_property
    def _division(self) -> _Division:
        """What the layers of stages depend on."""
        pp, program = self.topology.pp, self.program
        float8 = program.dtype == "float8"
        return _Division(
            shape=self.shape,
            seq_len=self.seq_len,
            pp=pp,
            stages_per_rank=self.num_stages // pp,
            schedule=self.schedule if pp > 1 else "1f1b",
            dense_float8=float8 or program.dense_float8,
            experts_float8=float8 or program.experts_float8,
        )

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of a place along pp."""
        return self._division.stages_of(pp_rank)

    def layers_of(self, pp_rank: int) -> tuple[int, ...]:
        """The layers of a place along pp; those of multi-token prediction are on the last stage."""
        return _layers(self._division, self.stages_of(pp_rank))

    def kinds_of(self, pp_rank: int) -> dict[tuple[int, Recompute], int]:
        """How many layers of a place are alike: by one layer of the kind, and how a layer is
        recomputed."""
        layers = self.layers_of(pp_rank)
        return _kinds(self.shape, layers, self.recompute, self.recompute_layer_freq)

    def kinds_by_stage(self, pp_rank: int) -> list[dict[tuple[int, Recompute], int]]:
        """The same for each stage of a place, in the order of :meth:`stages_of`."""
        kinds, position = [], 0
        for stage in self.stages_of(pp_rank):
            layers = _layers(self._division, (stage,))
            how = self.recompute, self.recompute_layer_freq
            kinds.append(_kinds(self.shape, layers, *how, position))
            position += len(layers)
        return kinds

    @property
    def places(self) -> frozenset[int]:
        """The places along pp that can have the most to do or to hold: the first two, the last, and
        of those whose stages have equal layers the first and the last. What a place holds between
        those two lies between what they hold: see :func:`convoy.plan.memory.in_flight`."""
        return _places(self._division)

    def with_(self, **changes: object) -> Work:
        """A copy with other fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


class _Division(NamedTuple):
    shape: ModelShape
    seq_len: int
    pp: int
    stages_per_rank: int
    schedule: ScheduleName
    dense_float8: bool
    experts_float8: bool

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        return _stages_of(pp_rank, self.pp, self.stages_per_rank, self.schedule)


@lru_cache(4096)
def _stages_of(
    pp_rank: int, pp: int, stages_per_rank: int, schedule: ScheduleName
) -> tuple[int, ...]:
    kind = PipelineSchedule(schedule)
    return tuple(s for s in range(pp * stages_per_rank) if place_of(s, pp, kind) == pp_rank)


@lru_cache(1024)
def _places(division: _Division) -> frozenset[int]:
    alike: dict[tuple[tuple[bool, ...], ...], list[int]] = {}
    for pp_rank in range(division.pp):
        layers = [_layers(division, (stage,)) for stage in division.stages_of(pp_rank)]
        kinds = tuple(tuple(division.shape.is_moe(layer) for layer in stage) for stage in layers)
        alike.setdefault(kinds, []).append(pp_rank)
    ends = {pp_rank for places in alike.values() for pp_rank in (places[0], places[-1])}
    return frozenset({0, min(1, division.pp - 1), division.pp - 1} | ends)


@lru_cache(16_384)
def _layers(division: _Division, stages: tuple[int, ...]) -> tuple[int, ...]:
    split, shape = _stages(division), division.shape
    after = shape.all_layers[shape.num_layers :] if len(split) - 1 in stages else ()
    return (*(layer for stage in stages for layer in split[stage]), *after)


def _recomputed(position: int, recompute: Recompute, freq: int) -> Recompute:
    return "none" if position % freq else recompute


@lru_cache(16_384)
def _kinds(
    shape: ModelShape, layers: tuple[int, ...], recompute: Recompute, freq: int, start: int = 0
) -> dict[tuple[int, Recompute], int]:
    def kind(layer: int) -> int:
        if layer >= shape.num_layers:
            return layer
        return shape.num_layers - 1 if shape.is_moe(layer) else 0

    return dict(
        Counter(
            (kind(layer), _recomputed(i, recompute, freq)) for i, layer in enumerate(layers, start)
        )
    )


@lru_cache(1024)
def _stages(division: _Division) -> list[range]:
    return divide_layers(
        _layer_costs(division),
        pp=division.pp,
        stages_per_rank=division.stages_per_rank,
        schedule=PipelineSchedule(division.schedule),
    )


def _layer_costs(division: _Division) -> LayerCosts:
    """As :func:`pretrain.parallelize.layer_costs`, of a shape."""
    shape = division.shape
    narrow = FLOAT8_COST if division.dense_float8 else 1.0
    routed = FLOAT8_COST if division.experts_float8 else 1.0

    def cost(layer: int) -> float:
        around = narrow * flops(shape.attention_gemms(1, 1))
        around += shape.scores_flops(division.seq_len, causal=True)
        gemms = shape.ffn_gemms(layer, 1, 1, 1)
        if not shape.is_moe(layer):
            return around + narrow * flops(gemms)
        router, *others = gemms  # then one product of each matrix of the routed experts
        experts = flops(others[: shape.expert_products])
        shared = flops(others[shape.expert_products :])
        return around + flops([router]) + routed * experts + narrow * shared

    num_dense = shape.first_k_dense if shape.num_experts else 0
    return LayerCosts(
        num_dense=num_dense,
        num_sparse=shape.num_layers - num_dense,
        dense=cost(0),
        sparse=cost(shape.num_layers - 1),
        end=shape.num_mtp_layers * cost(shape.num_layers) + flops(shape.head_gemms(1, 1)),
    )
