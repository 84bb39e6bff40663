"""Frozen parameters on real ranks: every layout has the numbers of one process, and what is frozen
has no gradient, no moments, and the bits that it began with."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from pretrain.state.names import parameter_name
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import Trained, bits_that_differ, check_gradients, spec_for, train
from tests.support.layouts import relative_error as error_of

STEPS = 3
SLOW = pytest.mark.slow
SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4, "num_layers": 4, "first_k_dense": 1},
    "moe": {
        "num_experts": 8, "num_shared_experts": 1, "aux_loss_coeff": 0.05, "expert_bias": True,
        "score_func": "sigmoid", "bias_update_rate": 0.01,
    },
    "train": {"steps": 20}, "batch": {"global_batch_size": 8}, "optimizer": {"eps": 1e-4},
}  # fmt: skip
LEARN = {
    "experts": ["layers.*.moe.experts.*"],
    "router": ["layers.*.moe.router.*"],
    "attention": ["layers.*.attention.w?.weight"],
    "last": ["layers.3.*", "head.weight"],
    "norms": ["*norm.weight"],
    "embedding": ["embed.weight"],
}
LORA: dict[str, dict[str, Any]] = {
    "lora": {"on": ["experts", "router", "attention", "dense"]},
    "lora of a layer": {"on": ["layers.3.attention.w[qo]"]},
}
LAYOUTS: list[Any] = [
    ("dp_shard=2,ep=2", "experts"),
    ("dp_shard=2,ep=2", "lora"),
    *(
        pytest.param(layout, learn, marks=SLOW)
        for learn in (*LEARN, *LORA)
        for layout in ("dp_shard=2", "dp_shard=2,ep=2", "tp=2", "cp=2", "pp=2",
                       "dp_replicate=2", "dp_shard=4,ep=2", "pp=2,dp_shard=2,ep=2",
                       "dp_shard=2,tp=2,ep=4", "pp=2,tp=2 zbv")
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("frozen")))


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    made: dict[tuple[str, bool], Trained] = {}

    def of(learn: str, exact: bool = False) -> Trained:
        if (learn, exact) not in made:
            made[learn, exact] = run(tmp_path_factory.mktemp("alone"), data, "", learn, exact)
        return made[learn, exact]

    return of


def tuning(learn: str) -> dict[str, Any]:
    if learn in LORA:
        return {"lora": {"rank": 3, **LORA[learn]}, "learn": ["*norm.weight"][: learn == "lora"]}
    return {"learn": LEARN[learn]}


def run(folder, data, layout: str, learn: str, exact: bool = False, **sections: Any) -> Trained:
    tables = {**SECTIONS, **sections, "tune": tuning(learn)}
    if exact:
        tables |= {"train": {"steps": 20, "exact": True}, "batch": {"global_batch_size": 8}}
    return train(spec_for(folder, data, layout, **tables), STEPS)


def learnt(name: str, learn: str, layer: int | None = None) -> bool:
    return any(fnmatchcase(parameter_name(name, layer), pattern) for pattern in LEARN[learn])


def check(trained: Trained, alone: Trained, learn: str) -> None:
    assert trained.gradients.keys() == alone.gradients.keys()
    for name in trained.gradients:
        if learn in LORA:
            assert ".lora." in name or name.endswith("norm.weight")
        else:
            assert any(fnmatchcase(name, pattern) for pattern in LEARN[learn])
    check_gradients(trained, alone)
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    assert trained.norms == pytest.approx(alone.norms, rel=1e-4)
    assert trained.state.keys() == alone.state.keys()
    for name, expected in alone.state.items():
        if name.startswith("model/"):
            assert error_of(trained.state[name], expected) <= 1e-4, name


@pytest.mark.parametrize(("layout", "learn"), LAYOUTS)
def test_a_layout_tunes_as_one_process_does(layout, learn, alone, data, tmp_path):
    check(run(tmp_path, data, layout, learn), alone(learn), learn)


@pytest.mark.parametrize(
    ("layout", "learn", "memory"),
    [
        ("dp_shard=2,ep=2", "lora", {"recompute": "full"}),
        ("dp_shard=2", "experts", {"zero_stage": 1}),
        ("pp=2,dp_shard=2", "last", {"zero_stage": 1}),
        ("pp=2,dp_shard=2", "lora of a layer", {"zero_stage": 2, "recompute": "selective"}),
        ("pp=2 zbv", "last", {}),
    ],
)
@pytest.mark.slow
def test_memory_settings_change_nothing(layout, learn, memory, alone, data, tmp_path):
    check(run(tmp_path, data, layout, learn, parallel={"memory": memory}), alone(learn), learn)


@pytest.mark.parametrize("learn", ["experts", *(pytest.param(n, marks=SLOW) for n in LEARN)])
def test_what_is_frozen_keeps_its_bits(learn, alone, data, tmp_path):
    """Against a run with the same first values in which other parameters learn."""
    other = "norms" if learn != "norms" else "router"
    tuned, there = alone(learn).state, alone(other).state
    for name in (n for n in there if n.startswith("model/")):
        rows = len(tuned[name]) if "/layers/" in name else 1
        # Dense layers come first.
        first = (4 - rows) * ("/moe/" in name)
        layers = [None] if rows == 1 else list(range(first, first + rows))
        for row, layer in enumerate(layers):
            pick = slice(None) if layer is None else row
            moved = not torch.equal(tuned[name][pick], there[name][pick])
            assert moved == (learnt(name, learn, layer) or learnt(name, other, layer)), name
        if name.endswith("expert_bias"):  # of the router, and no parameter
            continue
        moments = {f"optimizer/{kind}/{name.removeprefix('model/')}"
                   for kind in ("exp_avg", "exp_avg_sq")}  # fmt: skip
        learns = any(learnt(name, learn, layer) for layer in layers)
        assert (moments & tuned.keys()) == (moments if learns else set())


@pytest.mark.parametrize("layout", ["dp_shard=2,ep=2", pytest.param("pp=2", marks=SLOW)])
@pytest.mark.parametrize("learn", ["experts", pytest.param("router", marks=SLOW)])
@pytest.mark.slow
def test_exact_runs_have_equal_bits(layout, learn, alone, data, tmp_path):
    trained = run(tmp_path, data, layout, learn, exact=True)
    assert bits_that_differ(trained, alone(learn, True)) == []
