"""The layers of each pipeline stage.

What takes time is the costliest rank: a rank computes all of its stages for every micro-batch. So
layers are divided over ranks, and then over the stages of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moe import MoEConfig
from parallel import PipelineSchedule
from pretrain.model import ModelConfig, forward_flops
from pretrain.parallelize.schedule import place_of

FLOAT8_COST = 0.5
"""The time of a product in float8, as a share of the same product in bfloat16: the data sheets of
H100, H200, B200 and MI300X have twice the operations a second."""

SLACK = 0.01
"""With several stages on a rank: by how much the costliest rank may cost more than it must."""


@dataclass(frozen=True)
class LayerCosts:
    """What each layer of a decoder costs, in one unit. Layers of a kind cost the same."""

    num_dense: int
    """The first layers, which are of another kind than the rest."""
    num_sparse: int
    """The rest."""
    dense: float
    """One of the first layers."""
    sparse: float
    """One of the rest."""
    end: float
    """What the last stage has besides: the head, and all of multi-token prediction."""

    @property
    def num_layers(self) -> int:
        """All layers."""
        return self.num_dense + self.num_sparse

    def of(self, layers: range) -> float:
        """Consecutive layers, without ``end``."""
        first = max(0, min(layers.stop, self.num_dense) - layers.start)
        return first * self.dense + (len(layers) - first) * self.sparse


def layer_costs(
    model: ModelConfig, moe: MoEConfig | None, *, seq_len: int, dense_float8: bool = False
) -> LayerCosts:
    """Model FLOPs of a token in each layer, see :func:`pretrain.model.forward_flops`; products in
    float8 count :data:`FLOAT8_COST` times. The head is never in float8.

    Args:
        model: the decoder.
        moe: its MoE layers; None without.
        seq_len: tokens of a full sequence.
        dense_float8: attention's projections, dense layers and shared experts are in float8.
    """
    narrow = FLOAT8_COST if dense_float8 else 1.0
    experts = FLOAT8_COST if moe is not None and moe.gemm == "float8" else 1.0

    def cost(config: ModelConfig) -> float:
        flops = forward_flops(config, moe, seq_len)
        routed = shared = 0.0
        if moe is not None:
            gates = 2 * len(config.moe_layers) * moe.d_model * moe.shared_expert_gate
            each = (flops.experts - gates) / (moe.top_k + moe.num_shared_experts)
            routed, shared = each * moe.top_k, each * moe.num_shared_experts + gates
        products = flops.attention_projections + flops.dense_layers + shared
        rest = flops.attention_scores + flops.routers + flops.head + flops.mtp_projections
        return narrow * products + experts * routed + rest

    def cost_of(num_layers: int, num_dense: int, num_mtp_layers: int = 0) -> float:
        sizes = {"num_layers": num_layers, "first_k_dense": num_dense}
        return cost(model.model_copy(update=sizes | {"num_mtp_layers": num_mtp_layers}))

    num_dense = 0 if moe is None else model.first_k_dense
    head = cost_of(0, 0)
    return LayerCosts(
        num_dense=num_dense,
        num_sparse=model.num_layers - num_dense,
        dense=cost_of(1, 1) - head,
        sparse=cost_of(1, 0) - head,
        end=cost_of(0, 0, model.num_mtp_layers),
    )


def stage_layers(
    model: ModelConfig,
    moe: MoEConfig | None,
    *,
    seq_len: int,
    pp: int,
    stages_per_rank: int = 1,
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B,
    dense_float8: bool = False,
) -> list[range]:
    """The layers of every stage, as :func:`divide_layers` divides the costs of
    :func:`layer_costs`.

    Raises ValueError where the model has fewer layers than stages.
    """
    L, num_stages = model.num_layers, pp * stages_per_rank
    if num_stages > L:
        raise ValueError(
            f"model.num_layers ({L}) must be at least parallel.pp x "
            f"parallel.pipeline.stages_per_rank ({num_stages} stages)"
        )
    costs = layer_costs(model, moe, seq_len=seq_len, dense_float8=dense_float8)
    return divide_layers(costs, pp=pp, stages_per_rank=stages_per_rank, schedule=schedule)


def divide_layers(
    costs: LayerCosts, *, pp: int, stages_per_rank: int, schedule: PipelineSchedule
) -> list[range]:
    """Consecutive layers for every stage, with the smallest cost of the costliest rank.

    A rank costs what all of its stages cost together, see
    :func:`pretrain.parallelize.schedule.place_of`. With several stages on a rank the costliest rank
    may cost up to :data:`SLACK` more than the smallest cost, so that stages of about equal cost are
    found: other ranks wait for a long stage. The first stage has no layer, and nothing but the
    embedding, or the last stage nothing but ``end``, only where the costliest rank then costs less
    by more than that. Every other stage has a layer.
    """
    num_stages = pp * stages_per_rank
    if num_stages == 1:
        return [range(costs.num_layers)]
    places = [place_of(stage, pp, schedule) for stage in range(num_stages)]
    slack = SLACK if stages_per_rank > 1 else 0.0
    full, open_ends = [1] * num_stages, [0, *[1] * (num_stages - 2), 0]
    cost, least = _least_cost(costs, places, full), full
    open_cost = _least_cost(costs, places, open_ends)
    if open_cost * (1 + slack) < cost * (1 - 1e-9):
        cost, least = open_cost, open_ends
    drafts = (
        _within(cost * (1 + slack), costs, places, least, turn, turn_dense)
        for turn, turn_dense in _turns(costs, least)
    )
    ways = [draft.spread(costs) for draft in drafts if draft is not None]
    assert ways, "there are at least as many layers as stages"
    _, counts = min(ways, key=lambda way: way[0])
    layers, start = [], 0
    for count in counts:
        layers.append(range(start, start + count))
        start += count
    return layers


@dataclass(frozen=True)
class _Division:
    """How many layers of each kind each rank has."""

    turn: int
    """The stage that may have layers of both kinds: earlier ones have dense layers only, later ones
    none."""
    places: list[int]
    least: list[int]
    """The smallest number of layers of each stage."""
    turn_dense: bool
    """Whether the smallest number of layers of stage ``turn`` is one of dense layers."""
    dense: list[int]
    """Of each rank."""
    sparse: list[int]

    def spread(self, costs: LayerCosts) -> tuple[float, list[int]]:
        """The cost of the costliest stage, and the number of layers of each stage: each next layer
        of a rank goes to the stage that costs least, of several to the latest."""
        counts = [0] * len(self.places)
        load = [0.0] * len(self.places)
        load[-1] += costs.end
        for kind, numbers, cost in (
            ("dense", self.dense, costs.dense),
            ("sparse", self.sparse, costs.sparse),
        ):
            mine = [s for s in range(len(self.places)) if self._takes(s, kind)]
            least = {s: self._least_of(s, kind) for s in mine}
            for place, number in enumerate(numbers):
                here = [s for s in mine if self.places[s] == place]
                for stage in here:
                    counts[stage] += least[stage]
                    load[stage] += least[stage] * cost
                for _ in range(number - sum(least[s] for s in here)):
                    stage = min(here, key=lambda s: (load[s], -s))
                    counts[stage] += 1
                    load[stage] += cost
        return max(load), counts

    def _takes(self, stage: int, kind: str) -> bool:
        return stage <= self.turn if kind == "dense" else stage >= self.turn

    def _least_of(self, stage: int, kind: str) -> int:
        if stage == self.turn and (kind == "dense") != self.turn_dense:
            return 0
        return self.least[stage]


def _turns(costs: LayerCosts, least: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Every ``turn`` and ``turn_dense`` of a :class:`_Division` that can be."""
    for turn in range(len(least)):
        if sum(least[:turn]) > costs.num_dense:
            return
        if least[turn] and costs.num_dense:
            yield turn, True
        yield turn, False


def _least_cost(costs: LayerCosts, places: list[int], least: list[int]) -> float:
    """The smallest cost of the costliest rank; infinite where there are fewer layers than ``least``
    asks for."""
    if sum(least) > costs.num_layers:
        return math.inf
    k, n = costs.num_dense, costs.num_sparse
    mean = (costs.dense * k + costs.sparse * n + costs.end) / (max(places) + 1)
    sums = sorted(
        cost
        for i in range(k + 1) for j in range(n + 1) for end in (0.0, costs.end)
        if (cost := costs.dense * i + costs.sparse * j + end) >= mean * (1 - 1e-9)
    )  # fmt: skip
    high = len(sums)
    for turn, turn_dense in _turns(costs, least):
        low = 0
        while low < high:
            middle = (low + high) // 2
            if _within(sums[middle], costs, places, least, turn, turn_dense) is None:
                low = middle + 1
            else:
                high = middle
    return sums[high] if high < len(sums) else math.inf


def _within(
    limit: float,
    costs: LayerCosts,
    places: list[int],
    least: Sequence[int],
    turn: int,
    turn_dense: bool,
) -> _Division | None:
    """A division in which no rank costs more than ``limit``; None where there is none."""
    pp, k, n = max(places) + 1, costs.num_dense, costs.num_sparse
    draft = _Division(turn, places, [*least], turn_dense, [], [])
    least_dense, least_sparse = [0] * pp, [0] * pp
    may_dense, may_sparse = [False] * pp, [False] * pp
    for stage, place in enumerate(places):
        if draft._takes(stage, "dense"):
            least_dense[place] += draft._least_of(stage, "dense")
            may_dense[place] = True
        if draft._takes(stage, "sparse"):
            least_sparse[place] += draft._least_of(stage, "sparse")
            may_sparse[place] = True
    if sum(least_sparse) > n:
        return None
    ends = [costs.end * (place == places[-1]) for place in range(pp)]
    rooms = [limit * (1 + 1e-12) - end for end in ends]
    # By the dense layers of the ranks so far: the most other layers that these ranks can have, and
    # how many dense layers each of them has then.
    most: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for place in range(pp):
        extended: dict[int, tuple[int, tuple[int, ...]]] = {}
        for before, (others, each) in most.items():
            for here in range(least_dense[place], (k - before if may_dense[place] else 0) + 1):
                room = rooms[place] - here * costs.dense
                sparse = int(room // costs.sparse) if may_sparse[place] else 0
                if room < 0 or sparse < least_sparse[place]:
                    break
                total = others + min(sparse, n)
                if total > extended.get(before + here, (-1, ()))[0]:
                    extended[before + here] = total, (*each, here)
        most = extended
    if k not in most or most[k][0] < n:
        return None
    dense = [*most[k][1]]
    sparse_counts = [
        min(n, int((rooms[place] - dense[place] * costs.dense) // costs.sparse))
        if may_sparse[place] else 0
        for place in range(pp)
    ]  # fmt: skip
    # What is too much is taken from the costliest ranks, of several from the first: the first ranks
    # hold most micro-batches.
    for _ in range(sum(sparse_counts) - n):
        place = max(
            (p for p in range(pp) if sparse_counts[p] > least_sparse[p]),
            key=lambda p: (ends[p] + dense[p] * costs.dense + sparse_counts[p] * costs.sparse, -p),
        )
        sparse_counts[place] -= 1
    return _Division(turn, places, [*least], turn_dense, dense, sparse_counts)
