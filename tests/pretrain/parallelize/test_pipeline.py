"""Stages of a pipeline: which layers each has, and what its schedules do."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe import MoEConfig
from parallel import ParallelDims, PipelineSchedule, Topology
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder
from pretrain.model.flops import forward_flops
from pretrain.parallelize.micro_batches import LocalBatch
from pretrain.parallelize.pipeline import Pipeline, _Step
from pretrain.parallelize.schedule import bubble, place_of
from pretrain.parallelize.stages import SLACK, layer_costs, stage_layers
from pretrain.spec import load_spec
from tests.support.ranks import run_ranks

MOE = MoEConfig(d_model=32, d_ff=24, num_experts=8, top_k=3)


def config(**fields: int) -> ModelConfig:
    sizes = {"vocab_size": 300, "d_model": 32, "num_layers": 7, "num_heads": 4, "num_kv_heads": 2,
             "d_ff": 400, "first_k_dense": 2}  # fmt: skip
    return ModelConfig(**sizes | fields)


SCHEDULES = [
    (PipelineSchedule.GPIPE, 1), (PipelineSchedule.ONE_F_ONE_B, 1),
    (PipelineSchedule.ONE_F_ONE_B, 2), (PipelineSchedule.ZBV, 2), (PipelineSchedule.DUALPIPEV, 2),
]  # fmt: skip


def upto(model: ModelConfig, layers: int, *, whole: bool) -> float:
    """FLOPs of the first so many layers; with ``whole`` those of head and multi-token prediction
    too."""
    sizes = {"num_layers": layers, "first_k_dense": min(layers, model.first_k_dense)}
    if not whole:
        sizes["num_mtp_layers"] = 0
    flops = forward_flops(model.model_copy(update=sizes), MOE, 64)
    return flops.total - (0 if whole else flops.head)


def costliest(model: ModelConfig, stages: list[range], places: list[int]) -> float:
    """The cost of the costliest rank, counted from models of fewer layers."""
    costs = [0.0] * (max(places) + 1)
    for stage, (layers, place) in enumerate(zip(stages, places, strict=True)):
        last = stage == len(stages) - 1
        end = upto(model, layers.stop, whole=last)
        costs[place] += end - upto(model, layers.start, whole=False)
    return max(costs)


@pytest.mark.parametrize(
    "fields",
    [
        {}, {"vocab_size": 3_000}, {"vocab_size": 20_000}, {"d_ff": 4000}, {"num_mtp_layers": 2},
        {"first_k_dense": 0}, {"first_k_dense": 7}, {"first_k_dense": 5, "d_ff": 30},
    ],
)  # fmt: skip
@pytest.mark.parametrize(("schedule", "stages_per_rank"), [*SCHEDULES[1:4], (SCHEDULES[1][0], 3)])
def test_no_other_cut_has_a_cheaper_costliest_rank(fields, schedule, stages_per_rank):
    model = config(**fields)
    for pp in range(1 if stages_per_rank == 1 else 2, 7 // stages_per_rank + 1):
        count, slack = pp * stages_per_rank, SLACK if stages_per_rank > 1 else 1e-9
        places = [place_of(stage, pp, schedule) for stage in range(count)]
        stages = stage_layers(
            model, MOE, seq_len=64, pp=pp, stages_per_rank=stages_per_rank, schedule=schedule
        )
        assert [i for stage in stages for i in stage] == list(range(7))
        assert all(stages[1:-1])
        least = costliest(model, stages, places)
        cheapest_full = least
        for inner in itertools.combinations_with_replacement(range(8), count - 1):
            other = [range(a, b) for a, b in itertools.pairwise((0, *inner, 7))]
            if all(other[1:-1]):  # the first and the last stage may have no layer
                assert least <= costliest(model, other, places) * (1 + slack), (stages, other)
        if not all(stages):
            cheapest_full = min(
                costliest(model, [range(a, b) for a, b in itertools.pairwise((0, *inner, 7))],
                          places)
                for inner in itertools.combinations(range(1, 7), count - 1)
            )  # fmt: skip
            assert least < cheapest_full, "an empty stage must make the costliest rank cheaper"


def test_several_stages_of_a_rank_are_balanced_together():
    # Sizes of DeepSeek-V3: divided by stages alone, the slowest of 16 ranks with two stages each
    # was 12 % above the mean.
    spec = load_spec(Path(__file__).parents[3] / "tools/recipes/deepseek-v3.toml")
    interleaved = SCHEDULES[1][0]
    cases = [*itertools.product((2, 4, 8, 16), SCHEDULES[1:4]), (8, (interleaved, 4)),
             (4, (interleaved, 8))]  # fmt: skip
    for pp, (schedule, count) in cases:
        places = [place_of(stage, pp, schedule) for stage in range(pp * count)]
        stages = stage_layers(
            spec.model, spec.moe, seq_len=4096, pp=pp, stages_per_rank=count, schedule=schedule
        )
        costs = layer_costs(spec.model, spec.moe, seq_len=4096)
        ranks = [
            sum(costs.of(stages[s]) for s, place in enumerate(places) if place == rank)
            + costs.end * (places[-1] == rank)
            for rank in range(pp)
        ]
        mean = sum(ranks) / pp
        assert max(ranks) <= 1.03 * mean
        lengths = [costs.of(layers) for layers in stages]
        lengths[-1] += costs.end
        assert max(lengths) - min(lengths) <= max(costs.dense, 2.5 * costs.sparse), stages


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(ValueError, match=r"num_layers \(7\) must be at least .* \(8 stages\)"):
        stage_layers(config(), MOE, seq_len=64, pp=4, stages_per_rank=2)


@pytest.mark.parametrize("pp", [2, 3, 5])
def test_a_v_goes_there_and_back_and_others_round_and_round(pp):
    for schedule in (PipelineSchedule.ZBV, PipelineSchedule.DUALPIPEV):
        places = [place_of(stage, pp, schedule) for stage in range(2 * pp)]
        assert places == [*range(pp), *reversed(range(pp))]
    for schedule in (PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B):
        assert [place_of(stage, pp, schedule) for stage in range(2 * pp)] == [*range(pp)] * 2


COUNTS = [1, 3, 7, 8, 13]


@pytest.fixture(scope="module")
def orders() -> Any:
    """By rank, by schedule, for each of COUNTS: how many micro-batches there are then, and what the
    rank does."""
    return run_ranks(orders_on_rank, 4)


def orders_on_rank(rank: int) -> dict[tuple[str, int], list[tuple[int, list[str]]]]:
    dims = ParallelDims.build(Topology(pp=4), "cpu")
    return {case: orders_of(rank, dims, *case) for case in SCHEDULES}


def orders_of(
    rank: int, dims: ParallelDims, schedule: PipelineSchedule, stages_per_rank: int
) -> list[tuple[int, list[str]]]:
    model = config(num_layers=8)
    num_stages = 4 * stages_per_rank
    stages = stage_layers(
        model, MOE, seq_len=64, pp=4, stages_per_rank=stages_per_rank, schedule=schedule
    )
    parts = {}
    for stage in range(num_stages):
        if place_of(stage, 4, schedule) == rank:
            with torch.device("meta"):
                parts[stage] = Decoder(model, MOE, stages[stage])
    pipeline = Pipeline(parts, num_stages, schedule=schedule, pp_mesh=dims.pp_mesh, moe=MOE)
    found = []
    for count in COUNTS:
        padded = len(pipeline.padded([torch.zeros(0, 4)] * count))
        found.append((padded, [str(action) for action in pipeline.order(padded)]))
    return found


def unknown_action_on_rank(rank: int) -> str:
    dims = ParallelDims.build(Topology(pp=2), "cpu")
    model = config(num_layers=2, first_k_dense=1)
    with torch.device("meta"):
        stages = {rank: Decoder(model, MOE, range(rank, rank + 1))}
    pipeline = Pipeline(
        stages, 2, schedule=PipelineSchedule.ONE_F_ONE_B, pp_mesh=dims.pp_mesh, moe=MOE
    )
    step = _Step(
        pipeline, [torch.zeros(0, 4)], divisor=1.0, device=torch.device("cpu"),
        local_batch=LocalBatch(), reduce_once=False,
    )  # fmt: skip
    kind = SimpleNamespace(name="QUANTIZE_GRAD")
    step.order = [SimpleNamespace(computation_type=kind, stage_index=rank, microbatch_index=0)]
    with pytest.raises(RuntimeError) as caught:
        step.run()
    return str(caught.value)


def test_an_action_that_torch_adds_is_refused():
    for said in run_ranks(unknown_action_on_rank, 2):
        assert "has a pipeline action that Convoy does not know" in said
        assert "(QUANTIZE_GRAD); known are BACKWARD_INPUT, " in said


@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_a_simulated_step_has_the_bubble_of_the_formula(schedule, stages_per_rank, orders):
    ranks = [rank[schedule, stages_per_rank] for rank in orders]
    padded = [each[0] for each in ranks[0]]
    assert padded == {
        (PipelineSchedule.ONE_F_ONE_B, 2): [4, 4, 8, 8, 16],
        (PipelineSchedule.DUALPIPEV, 2): [8, 8, 8, 8, 13],
    }.get((schedule, stages_per_rank), COUNTS)
    for i, m in enumerate(padded):
        actions = [rank[i][1] for rank in ranks]
        waits = 1 - m * 3.0 / simulated(actions, stages_per_rank)
        if m >= 7 or not schedule.folds_into_v:
            assert waits == pytest.approx(bubble(4, stages_per_rank, m, schedule))
        if schedule.folds_into_v:
            assert waits < bubble(4, 1, m)
            assert waits < bubble(4, 2, m) / 2 or m < 7
        for rank, order in enumerate(actions):
            assert_all_is_done_once(rank, order, m, schedule, stages_per_rank)


def assert_all_is_done_once(
    rank: int,
    order: list[str],
    micro_batches: int,
    schedule: PipelineSchedule,
    stages_per_rank: int,
) -> None:
    """Every forward and backward of a rank's stages, none in one pass between the two of another;
    and nothing is sent from the rank to itself."""
    assert len(set(order)) == len(order)
    done = {action: at for at, action in enumerate(order)}
    last = 4 * stages_per_rank - 1
    here = [s for s in range(last + 1) if place_of(s, 4, schedule) == rank]
    for stage in here:
        for turn in range(micro_batches):
            if f"{stage}B{turn}" in done:
                assert done[f"{stage}F{turn}"] < done[f"{stage}B{turn}"]
                assert f"{stage}I{turn}" not in done
            else:
                f, i, w = (done[f"{stage}{kind}{turn}"] for kind in "FIW")
                assert f < i < w
                assert not any(kind_of(a) == "B" and stage_of(a) == stage for a in order[i:w])
            assert (f"{stage}SEND_F{turn}" in done) == (stage < last and stage + 1 not in here)
            assert (f"{stage}RECV_F{turn}" in done) == (stage > 0 and stage - 1 not in here)
            assert (f"{stage}SEND_B{turn}" in done) == (stage > 0 and stage - 1 not in here)
            assert (f"{stage}RECV_B{turn}" in done) == (stage < last and stage + 1 not in here)


def simulated(ranks: list[list[str]], stages_per_rank: int) -> float:
    """How long a step takes. Forward 1, the two passes of a backward 1 each, of a rank's stages
    together; nothing else takes time."""
    done: dict[str, float] = {}
    clock, at = [0.0] * 4, [0] * 4
    here = [{stage_of(action) for action in order} for order in ranks]
    while any(at[r] < len(ranks[r]) for r in range(4)):
        moved = False
        for r in range(4):
            while at[r] < len(ranks[r]):
                action = ranks[r][at[r]]
                needs = before(action, 4 * stages_per_rank, here[r])
                if needs and needs not in done:
                    break
                kind = kind_of(action)
                cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}.get(kind, 0.0) / stages_per_rank
                start = max(clock[r], done.get(needs, 0.0)) if cost or "RECV" in kind else clock[r]
                if cost:
                    clock[r] = start + cost
                done[action] = clock[r] if cost else start
                if kind == "I":
                    done[action.replace("I", "B")] = clock[r]
                at[r], moved = at[r] + 1, True
        assert moved, "the ranks wait for each other"
    return max(clock)


def stage_of(action: str) -> int:
    return int(action[: len(action) - len(action.lstrip("0123456789"))])


def kind_of(action: str) -> str:
    return action.lstrip("0123456789").rstrip("0123456789")


def before(action: str, num_stages: int, here: set[int]) -> str:
    """What must have been done first, on whatever rank; ``here`` are the stages of this one."""
    kind, stage = kind_of(action), stage_of(action)
    turn = action[len(str(stage)) + len(kind) :]
    came = f"{stage - 1}F{turn}" if stage - 1 in here else f"{stage}RECV_F{turn}"
    came_back = f"{stage + 1}B{turn}" if stage + 1 in here else f"{stage}RECV_B{turn}"
    backward = came_back if stage < num_stages - 1 else f"{stage}F{turn}"
    return {
        "F": came if stage else "",
        "B": backward,
        "I": backward,
        "W": f"{stage}I{turn}",
        "RECV_F": f"{stage - 1}SEND_F{turn}",
        "RECV_B": f"{stage + 1}SEND_B{turn}",
        "SEND_F": f"{stage}F{turn}",
        "SEND_B": f"{stage}B{turn}",
    }.get(kind, "")
