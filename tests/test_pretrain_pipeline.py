"""Stages of a pipeline: which layers each has, and what its schedules do."""

from __future__ import annotations

import itertools

import pytest
import torch

from moe import MoEConfig
from parallel import ParallelDims, Topology
from pretrain.flops import forward_flops
from pretrain.model import Decoder, ModelConfig
from pretrain.pipeline import Pipeline, stage_layers
from pretrain.schedule import bubble
from tests.dist import run_ranks

MOE = MoEConfig(d_model=32, d_ff=24, num_experts=8, top_k=3)


def config(**fields: int) -> ModelConfig:
    sizes = {"vocab_size": 300, "d_model": 32, "num_layers": 7, "num_heads": 4, "num_kv_heads": 2,
             "d_ff": 400, "first_k_dense": 2}  # fmt: skip
    return ModelConfig(**sizes | fields)


def costliest(model: ModelConfig, stages: list[range]) -> float:
    """Counted layer by layer, from models of one layer less."""

    def upto(n: int) -> float:
        if n == 0:
            return 0.0
        dense = min(n, model.first_k_dense)
        part = model.model_copy(update={"num_layers": n, "first_k_dense": dense})
        flops = forward_flops(part, MOE, 64)
        return flops.total - (flops.head if n < model.num_layers else 0)

    return max(upto(stage.stop) - upto(stage.start) for stage in stages)


@pytest.mark.parametrize("fields", [{}, {"vocab_size": 20_000}, {"d_ff": 4000}])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 7])
def test_no_other_cut_has_a_cheaper_costliest_stage(fields, num_stages):
    model = config(**fields)
    stages = stage_layers(model, MOE, 64, num_stages)
    assert [i for stage in stages for i in stage] == list(range(7))
    assert all(stages)
    found = costliest(model, stages)
    for inner in itertools.combinations(range(1, 7), num_stages - 1):
        ends = (0, *inner, 7)
        other = [range(a, b) for a, b in itertools.pairwise(ends)]
        assert found <= costliest(model, other) * (1 + 1e-9), (stages, other)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ValueError, match=r"num_layers \(7\) must be at least .* \(8 stages\)"):
        stage_layers(config(), MOE, 64, 8)


def order_on_rank(rank: int, schedule: str, stages_per_rank: int) -> list[list[str]]:
    dims = ParallelDims.build(Topology(pp=4), "cpu")
    model = config(num_layers=8)
    num_stages = 4 * stages_per_rank
    stages = stage_layers(model, MOE, 64, num_stages)
    parts = {}
    for stage in range(rank, num_stages, 4):
        with torch.device("meta"):
            parts[stage] = Decoder(model, MOE, stages[stage])
    pipeline = Pipeline(parts, num_stages, schedule, dims.pp_mesh, MOE)
    empty = [torch.zeros(0, 4)] * 3
    sizes = [len(pipeline.padded(empty)), len(pipeline.padded(empty * 3))]
    assert sizes == ([3, 9] if stages_per_rank == 1 else [4, 12])
    return [[str(action) for action in pipeline.order(8)]]


@pytest.mark.parametrize(("schedule", "stages_per_rank"), [("gpipe", 1), ("1f1b", 1), ("1f1b", 2)])
def test_a_simulated_step_has_the_bubble_of_the_formula(schedule, stages_per_rank):
    ranks = [result[0] for result in run_ranks(order_on_rank, 4, schedule, stages_per_rank)]
    done: dict[str, float] = {}
    clock, at = [0.0] * 4, [0] * 4
    # Forward 1, backward 2, of a rank's stages together; nothing else takes time.
    while any(at[r] < len(ranks[r]) for r in range(4)):
        moved = False
        for r in range(4):
            while at[r] < len(ranks[r]):
                needs = before(ranks[r][at[r]], 4 * stages_per_rank)
                if needs and needs not in done:
                    break
                kind = kind_of(ranks[r][at[r]])
                cost = {"F": 1.0, "B": 2.0}.get(kind, 0.0) / stages_per_rank
                start = max(clock[r], done.get(needs, 0.0)) if cost or "RECV" in kind else clock[r]
                if cost:
                    clock[r] = start + cost
                done[ranks[r][at[r]]] = clock[r] if cost else start
                at[r], moved = at[r] + 1, True
        assert moved, "the ranks wait for each other"
    busy = 8 * 3.0
    assert 1 - busy / max(clock) == pytest.approx(bubble(4, stages_per_rank, 8))


def kind_of(action: str) -> str:
    return action.lstrip("0123456789").rstrip("0123456789")


def before(action: str, num_stages: int) -> str:
    """What must have been done first, on whatever rank."""
    kind = kind_of(action)
    stage = int(action[: len(action) - len(action.lstrip("0123456789"))])
    turn = action[len(str(stage)) + len(kind) :]
    return {
        "F": f"{stage}RECV_F{turn}" if stage else "",
        "B": f"{stage}RECV_B{turn}" if stage < num_stages - 1 else f"{stage}F{turn}",
        "RECV_F": f"{stage - 1}SEND_F{turn}",
        "RECV_B": f"{stage + 1}SEND_B{turn}",
        "SEND_F": f"{stage}F{turn}",
        "SEND_B": f"{stage}B{turn}",
    }.get(kind, "")
