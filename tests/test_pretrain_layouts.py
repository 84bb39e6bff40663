"""The layout changes nothing else: every one of them against one process, on real ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from parallel import Topology, parse_topology
from pretrain.model import meta_decoder
from pretrain.parallelize import compile_regions
from tests.jobs import data_of, prepare_job
from tests.layouts import Trained, empty_arrays, relative_error, slices, spec_for, train, whole

STEPS, SAVED = 10, 7
# Three micro-batches a step, the last one short: on two ranks or more some are empty. A large eps:
# where a gradient is nearly zero AdamW would else make a step of its noise.
SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4, "num_layers": 4},
    "moe": {
        "num_experts": 8, "expert_bias": True, "num_shared_experts": 1, "z_loss_weight": 0.01,
        "load_balance_weight": 0.02, "sequence_balance_weight": 0.02,
        "capacity_policy": "fixed", "capacity_factor": 4.0,
    },
    "train": {"steps": 20, "global_batch_size": 5},
    "optimizer": {"eps": 1e-4},
}  # fmt: skip
LAYOUTS = [
    "dp_shard=2", "dp_replicate=2", "cp=2", "tp=2", "pp=2", "dp_shard=2,ep=2",
    "dp_replicate=2,dp_shard=2", "cp=2,ep=2", "tp=2,ep=2", "dp_shard=4,ep=2",
    "pp=2,dp_shard=2,ep=2", "pp=2,tp=2", "pp=3,dp_replicate=2",
    "pp=2,dp_shard=2,tp=2,ep=4",
]  # fmt: skip
MORE = [
    "pp=4", "dp_shard=2,tp=2", "pp=2,cp=2", "dp_shard=2,cp=2", "dp_replicate=2,cp=2",
    "dp_replicate=2,tp=2", "cp=2,tp=2", "tp=4,ep=4", "pp=2,dp_replicate=2",
    "pp=2,cp=2,tp=2,ep=4", "dp_shard=2,cp=2,tp=2,ep=4",
    "dp_replicate=2,dp_shard=2,tp=2,ep=2", "dp_replicate=2,cp=2,tp=2,ep=4",
]  # fmt: skip
BITWISE = ["tp=2", "pp=2", "pp=2,dp_shard=2,ep=2", "pp=2,tp=2", "cp=2,ep=2"]
EVERY = [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in MORE)]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("layouts")))


@dataclass(frozen=True)
class Run:
    """One layout's, whole; ``root`` has its checkpoint of step SAVED."""

    root: Path
    trained: Trained


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> Any:
    """Each layout's run, made when it is first asked for."""
    made: dict[str, Run] = {}

    def run(layout: str) -> Run:
        if layout not in made:
            folder = tmp_path_factory.mktemp("run")
            spec = spec_for(folder, data, layout, **SECTIONS)
            made[layout] = Run(spec.checkpoint_path, train(spec, STEPS, save_at=SAVED))
        return made[layout]

    return run


@pytest.mark.parametrize("layout", EVERY)
def test_a_layout_trains_as_one_process_does(layout: str, runs):
    alone, trained = runs("dp_shard=1").trained, runs(layout).trained
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    assert trained.norms == pytest.approx(alone.norms, rel=1e-4)
    assert trained.norms[0] == pytest.approx(alone.norms[0], rel=1e-5)
    assert len(set(alone.losses)) == STEPS
    assert trained.gradients.keys() == alone.gradients.keys()
    for name, expected in alone.gradients.items():
        error = relative_error(trained.gradients[name], expected)
        assert error <= 1e-5, f"gradient of {name}: {error}"
    assert trained.state.keys() == alone.state.keys()
    for name, expected in alone.state.items():
        if name.startswith("model/"):
            error = relative_error(trained.state[name], expected)
            assert error <= 1e-4, f"{name}: {error}"


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("pp=2", {"pp_schedule": "gpipe"}),
        ("pp=4", {"pp_schedule": "gpipe"}),
        ("pp=2", {"pp_stages_per_rank": 2}),
        ("pp=2,dp_shard=2,ep=2", {"pp_stages_per_rank": 2, "recompute": "full"}),
        ("pp=2,dp_shard=2", {"zero": 1}),
        ("dp_replicate=2,dp_shard=2", {"zero": 2}),
        ("tp=2,cp=2", {"recompute": "selective"}),
    ],
)
def test_schedules_and_recomputation_change_nothing_either(layout, parallel, runs, data, tmp_path):
    alone = runs("dp_shard=1").trained
    spec = spec_for(tmp_path, data, layout, parallel=parallel, **SECTIONS)
    trained = train(spec, 3)
    assert trained.losses == pytest.approx(alone.losses[:3], rel=1e-5)
    for name, expected in alone.gradients.items():
        error = relative_error(trained.gradients[name], expected)
        assert error <= 1e-5, f"gradient of {name}: {error}"


@pytest.mark.parametrize(
    ("topology", "regions"),
    [
        (Topology(dp_shard=4, ep=4, pp=2), {"attention", "ffn", "shared_experts"}),
        (Topology(cp=2), {"ffn", "shared_experts"}),
        (Topology(tp=2), {"shared_experts"}),
    ],
)
def test_regions_with_collectives_are_not_compiled(topology, regions, data, tmp_path):
    spec = spec_for(tmp_path, data, "", **SECTIONS)
    model = meta_decoder(spec.model, spec.moe)
    compile_regions(list(model.blocks.values()), topology)
    compiled = {n.rpartition(".")[2] for n, m in model.named_modules() if m._compiled_call_impl}
    assert compiled == regions


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["", "dp_shard=2,ep=2", "tp=2"])
def test_compiled_regions_change_nothing_either(layout, runs, data, tmp_path):
    alone = runs("dp_shard=1").trained
    sections = {**SECTIONS, "train": {**SECTIONS["train"], "compile": True}}
    trained = train(spec_for(tmp_path, data, layout, **sections), 2)
    assert trained.losses == pytest.approx(alone.losses[:2], rel=1e-5)
    for name, expected in alone.gradients.items():
        error = relative_error(trained.gradients[name], expected)
        assert error <= 1e-5, f"gradient of {name}: {error}"


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [("pp=2,cp=2", {}), ("pp=2", {"pp_stages_per_rank": 2}), ("tp=2,ep=2", {})],
)
def test_balance_over_the_global_batch(layout: str, parallel, data, tmp_path):
    sections = {**SECTIONS, "moe": {**SECTIONS["moe"], "load_balance_scope": "global_batch"}}
    alone = train(spec_for(tmp_path, data, "", **sections), 2)
    trained = train(spec_for(tmp_path, data, layout, parallel=parallel, **sections), 2)
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    for name, expected in alone.gradients.items():
        error = relative_error(trained.gradients[name], expected)
        assert error <= 1e-5, f"gradient of {name}: {error}"


@pytest.mark.parametrize(
    "layout",
    [
        *BITWISE,
        *(pytest.param(x, marks=pytest.mark.slow) for x in LAYOUTS + MORE if x not in BITWISE),
    ],
)
def test_a_resume_on_the_same_ranks_has_the_same_bits(layout: str, runs, data, tmp_path):
    run = runs(layout)
    spec = spec_for(tmp_path, data, layout, checkpoint={"path": str(run.root)}, **SECTIONS)
    resumed = train(spec, STEPS - SAVED)
    assert resumed.losses == run.trained.losses[SAVED:]
    for name, expected in run.trained.state.items():
        assert torch.equal(resumed.state[name], expected), name


def test_any_layout_loads_what_any_other_saved(runs, data, tmp_path):
    """Parameters and moments bitwise, on every rank of the layout that loads."""
    names = ["dp_shard=1", *LAYOUTS]
    pairs = [(a, b) for a in names for b in [*names, *MORE] if a != b]
    saved = {a: runs(a) for a in names}
    for a, b in random.Random(1).sample(pairs, 60):
        spec = spec_for(tmp_path, data, b, **SECTIONS)
        topology = parse_topology(b)
        manifest = ckpt.read_manifest(saved[a].root)
        ranks = []
        for rank in range(topology.world):
            arrays = empty_arrays(spec, topology, rank)
            ckpt.load(saved[a].root, manifest, arrays)
            ranks.append([piece for array in arrays for piece in slices(array)])
        for name, value in whole(ranks).items():
            assert torch.equal(value, saved[a].trained.saved[name]), f"{a} to {b}: {name}"


@pytest.mark.parametrize(
    ("before", "after"),
    [("pp=2,dp_shard=2,ep=2", "tp=2"), ("tp=2,ep=2", "pp=3,dp_replicate=2"), ("cp=2", "pp=2,tp=2")],
)
def test_a_run_goes_on_under_another_layout(before: str, after: str, runs, data, tmp_path):
    run, alone = runs(before), runs("dp_shard=1").trained
    checkpoint = {"path": str(run.root), "on_topology_change": "reshard"}
    spec = spec_for(tmp_path, data, after, checkpoint=checkpoint, **SECTIONS)
    resumed = train(spec, STEPS - SAVED)
    assert resumed.losses == pytest.approx(alone.losses[SAVED:], rel=1e-5)
