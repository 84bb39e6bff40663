"""Muon on real ranks: every layout has the numbers of one process, and goes on with any other's
state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import Trained, check_gradients, relative_error, spec_for, train

STEPS, SAVED = 5, 2
SLOW = pytest.mark.slow
# Epsilon: as for other layouts, AdamW's direction of a gradient that is nothing but rounding.
SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4, "num_layers": 4},
    "moe": {"num_experts": 8, "num_shared_experts": 1, "expert_bias": True},
    "train": {"steps": 20}, "batch": {"global_batch_size": 8},
    "optimizer": {"kind": "muon", "eps": 1e-4},
}  # fmt: skip
LAYOUTS: list[Any] = [
    "dp_shard=2,ep=2",
    *(
        pytest.param(layout, marks=SLOW)
        for layout in (
            "dp_shard=2", "tp=2", "cp=2", "pp=2", "dp_replicate=2", "dp_shard=4,ep=2",
            "dp_replicate=2,dp_shard=2,ep=2", "pp=2,dp_shard=2,ep=2", "dp_shard=2,tp=2,ep=4",
            "cp=2,tp=2", "pp=2,tp=2 zbv", "dp_replicate=3",
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("muon")))


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> Trained:
    return train(spec_for(tmp_path_factory.mktemp("alone"), data, "", **SECTIONS), STEPS)


def check(trained: Trained, alone: Trained, since: int = 0) -> None:
    assert trained.losses == pytest.approx(alone.losses[since:], rel=1e-5)
    assert trained.norms == pytest.approx(alone.norms[since:], rel=1e-4)
    assert trained.state.keys() == alone.state.keys()
    for name, expected in alone.state.items():
        if name.startswith("model/"):
            error = relative_error(trained.state[name], expected)
            assert error <= 1e-4, f"{name}: {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_process_does(layout: str, alone, data, tmp_path):
    trained = train(spec_for(tmp_path, data, layout, **SECTIONS), STEPS)
    check_gradients(trained, alone)
    check(trained, alone)
    kept = {name.split("/")[1] for name in trained.state if name.startswith("optimizer/")}
    assert kept == {"momentum_buffer", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("layout", "memory"),
    [
        pytest.param("dp_shard=2,ep=2", {"zero_stage": 1}, marks=SLOW),
        pytest.param("dp_replicate=2,dp_shard=2", {"zero_stage": 2}, marks=SLOW),
        pytest.param("pp=2,dp_shard=2", {"zero_stage": 1}, marks=SLOW),
        pytest.param("dp_shard=4,ep=2", {"recompute": "full"}, marks=SLOW),
    ],
)
def test_zero_stages_and_recomputation_change_nothing(layout, memory, alone, data, tmp_path):
    spec = spec_for(tmp_path, data, layout, parallel={"memory": memory}, **SECTIONS)
    check(train(spec, STEPS), alone)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("dp_shard=4,ep=2", "tp=2", marks=SLOW),
        pytest.param("pp=2,dp_shard=2,ep=2", "dp_replicate=2,dp_shard=2", marks=SLOW),
        pytest.param("tp=2", "pp=2", marks=SLOW),
        pytest.param("", "dp_shard=2,ep=2", marks=SLOW),
        pytest.param("dp_replicate=2", "", marks=SLOW),
    ],
)
def test_a_run_goes_on_under_another_layout(before, after, alone, data, tmp_path):
    train(spec_for(tmp_path, data, before, **SECTIONS), SAVED, save_at=SAVED)
    sections = {**SECTIONS, "checkpoint": {"reshard_on_load": True}}
    check(train(spec_for(tmp_path, data, after, **sections), STEPS - SAVED), alone, SAVED)


@SLOW
@pytest.mark.parametrize("layout", ["", "dp_replicate=2,dp_shard=2,ep=2"])
def test_a_resume_on_the_same_ranks_has_the_same_bits(layout: str, data, tmp_path):
    spec = spec_for(tmp_path, data, layout, **SECTIONS)
    straight = train(spec, 4, save_at=2)
    resumed = train(spec, 2)
    assert resumed.losses == straight.losses[2:]
    for name, expected in straight.state.items():
        assert torch.equal(resumed.state[name], expected), name


@SLOW
@pytest.mark.parametrize("layout", ["dp_shard=3", "dp_shard=3,tp=2", "pp=2,dp_shard=3"])
def test_uneven_slices_of_a_dense_model(layout: str, data, tmp_path):
    sections = {**SECTIONS, "moe": None, "model": {"num_layers": 3, "num_kv_heads": 4}}
    alone = train(spec_for(tmp_path, data, "", **sections), 3)
    check(train(spec_for(tmp_path, data, layout, **sections), 3), alone)


@SLOW
@pytest.mark.parametrize("layout", ["dp_shard=4,ep=2", "dp_replicate=2,tp=2"])
def test_bfloat16_is_near_to_one_process(layout: str, alone, data, tmp_path):
    """Newton-Schulz and what it sends are in bfloat16 too; sums before it round differently."""
    sections = {**SECTIONS, "precision": {"compute": "bfloat16"}}
    trained = train(spec_for(tmp_path, data, layout, **sections), 3)
    assert trained.losses == pytest.approx(alone.losses[:3], rel=5e-3)
    assert trained.losses != alone.losses[:3]
