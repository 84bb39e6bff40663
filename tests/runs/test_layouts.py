"""The layout changes nothing else: every one of them against one process, on real ranks."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import ckpt
from moe.copies import balance
from moe.experts.grouped import GroupedExperts
from parallel import Topology, WeightGradStore
from pretrain.checkpoint.resume import restore
from pretrain.job import build_job
from pretrain.model.decoder import meta_decoder
from pretrain.parallelize.decoder import compile_regions
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from tests.support.exact import FEATURES
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import (
    Trained,
    check_gradients,
    empty_arrays,
    relative_error,
    slices,
    spec_for,
    topology_of,
    train,
    whole,
)
from tests.support.ranks import run_ranks

STEPS, SAVED = 8, 6
# Three micro-batches a step, the last one short: on two ranks or more some are empty. A large eps:
# where a gradient is nearly zero AdamW would else make a step of its noise.
SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4, "num_layers": 4},
    "moe": {
        "num_experts": 8, "expert_bias": True, "num_shared_experts": 1, "z_loss_coeff": 0.01,
        "aux_loss_coeff": 0.02, "seq_aux_loss_coeff": 0.02,
        "capacity": {"policy": "fixed", "capacity_factor": 4.0},
    },
    "train": {"steps": 20}, "batch": {"global_batch_size": 5},
    "optimizer": {"eps": 1e-4},
}  # fmt: skip
LAYOUTS = [
    "cp=2", "tp=2", "pp=2", "dp_shard=2,ep=2", "pp=2,dp_shard=2,ep=2", "pp=2 zbv",
]  # fmt: skip
MORE = [
    "dp_shard=2", "dp_replicate=2", "cp=2,ep=2", "tp=2,ep=2", "dp_shard=4,ep=2",
    "dp_replicate=2,dp_shard=2", "pp=2,tp=2", "pp=3,dp_replicate=2", "pp=2,dp_shard=2,tp=2,ep=4",
    "pp=4", "dp_shard=2,tp=2", "pp=2,cp=2", "dp_shard=2,cp=2", "dp_replicate=2,cp=2",
    "dp_replicate=2,tp=2", "cp=2,tp=2", "tp=4,ep=4", "pp=2,dp_replicate=2",
    "pp=2,cp=2,tp=2,ep=4", "dp_shard=2,cp=2,tp=2,ep=4",
    "dp_replicate=2,dp_shard=2,tp=2,ep=2", "dp_replicate=2,cp=2,tp=2,ep=4",
    "pp=2 dualpipev", "pp=2,dp_shard=2,ep=2 zbv", "pp=2,tp=2 zbv", "pp=2,dp_replicate=2 zbv",
    "pp=2,dp_shard=2,tp=2,ep=4 zbv", "pp=2,dp_shard=2,ep=2 dualpipev",
]  # fmt: skip
BITWISE = ["pp=2,dp_shard=2,ep=2"]
SLOW = pytest.mark.slow
EVERY = [*LAYOUTS, *(pytest.param(layout, marks=SLOW) for layout in MORE)]


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
    check_gradients(trained, alone)
    assert trained.state.keys() == alone.state.keys()
    for name, expected in alone.state.items():
        if name.startswith("model/"):
            error = relative_error(trained.state[name], expected)
            assert error <= 1e-4, f"{name}: {error}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "recompute"),
    [
        ("cp=2,ep=2", "none"), ("tp=2,ep=2", "full"), ("dp_shard=4,ep=2", "selective"),
        ("dp_shard=2,cp=2,tp=2,ep=4", "none"), ("pp=2,dp_shard=2,ep=2", "full"),
        ("pp=2,dp_shard=2,ep=2 zbv", "none"), ("pp=2,dp_shard=2,ep=2 dualpipev", "none"),
    ],
)  # fmt: skip
def test_with_copies_a_layout_trains_as_one_process_does(layout, recompute, runs, data, tmp_path):
    sections = copy.deepcopy(SECTIONS)
    sections["moe"]["copies"] = 2
    sections["parallel"] = {"memory": {"recompute": recompute}}
    alone, trained = runs("dp_shard=1").trained, train(
        spec_for(tmp_path, data, layout, **sections), STEPS, first=count_copies
    )  # fmt: skip
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    assert trained.norms == pytest.approx(alone.norms, rel=1e-4)
    check_gradients(trained, alone)


def count_copies() -> None:
    """End the run where the first calls of this process with tokens make no copies."""
    plan, numbers = balance.plan_copies, list[int]()

    def counted(*arguments: Any) -> Any:
        made = plan(*arguments)
        if sum(arguments[0]):
            numbers.append(made.num_copies)
        assert len(numbers) < 8 or sum(numbers) > 0, "there is nothing to see"
        return made

    balance.plan_copies = counted


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("pp=2", {"pipeline": {"schedule": "gpipe"}}),
        pytest.param("pp=4", {"pipeline": {"schedule": "gpipe"}}, marks=SLOW),
        ("pp=2", {"pipeline": {"stages_per_rank": 2}}),
        pytest.param(
            "pp=2,dp_shard=2,ep=2",
            {"pipeline": {"stages_per_rank": 2}, "memory": {"recompute": "full"}},
            marks=SLOW,
        ),
        pytest.param("pp=2,dp_shard=2", {"memory": {"zero_stage": 1}}, marks=SLOW),
        pytest.param("dp_replicate=2,dp_shard=2", {"memory": {"zero_stage": 2}}, marks=SLOW),
        pytest.param("tp=2,cp=2", {"memory": {"recompute": "selective"}}, marks=SLOW),
        pytest.param("pp=2,dp_shard=2 zbv", {"memory": {"zero_stage": 1}}, marks=SLOW),
        pytest.param("pp=2,dp_shard=2 dualpipev", {"memory": {"zero_stage": 2}}, marks=SLOW),
        pytest.param("pp=2,tp=2,ep=2 zbv", {"memory": {"recompute": "full"}}, marks=SLOW),
        pytest.param(
            "pp=2,dp_shard=2,ep=2 dualpipev", {"memory": {"recompute": "selective"}}, marks=SLOW
        ),
    ],
)
def test_schedules_and_recomputation_change_nothing_either(layout, parallel, runs, data, tmp_path):
    alone = runs("dp_shard=1").trained
    spec = spec_for(tmp_path, data, layout, parallel=parallel, **SECTIONS)
    trained = train(spec, 3)
    assert trained.losses == pytest.approx(alone.losses[:3], rel=1e-5)
    check_gradients(trained, alone)


@pytest.mark.parametrize(
    ("layout", "backend"),
    [
        ("pp=2 zbv", "grouped_mm"),
        *(
            pytest.param(layout, backend, marks=SLOW)
            for layout in ("pp=4 zbv", "pp=3 zbv", "pp=3 dualpipev", "pp=2,dp_replicate=2 zbv")
            for backend in ("auto", "grouped_mm")
        ),
    ],
)
def test_a_v_of_stages_of_unequal_lengths(layout: str, backend: str, data, tmp_path):
    """Nine layers, two of them dense, and more micro-batches than a pipeline takes to fill; experts
    on the path that puts their weights' products aside, and on the one that does not."""
    model = {**SECTIONS["model"], "num_layers": 9, "first_k_dense": 2}
    sections = {**SECTIONS, "model": model, "moe": {**SECTIONS["moe"], "backend": backend}}
    sections["batch"] = {"global_batch_size": 13}
    alone = train(spec_for(tmp_path, data, "", **sections), 3)
    trained = train(spec_for(tmp_path, data, layout, **sections), 3)
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    check_gradients(trained, alone)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param("pp=2,dp_replicate=2 zbv", "float32", marks=SLOW),
        pytest.param("pp=2,dp_replicate=2 zbv", "float16", marks=SLOW),
        pytest.param("dp_replicate=2,dp_shard=2,ep=2", "float32", marks=SLOW),
        pytest.param("dp_replicate=2,tp=2", "float32", marks=SLOW),
        pytest.param("pp=2,dp_replicate=2 dualpipev", "float32", marks=SLOW),
    ],
)
def test_signs_are_those_of_parameters_wherever_they_are(layout, precision, data, tmp_path):
    """Blocks of numbers that share a magnitude are a parameter's own, wherever its stage is, or a
    slice's where a copy is cut: then they are others. And what is owed is resumed with."""
    sections = {**SECTIONS, "precision": {"compute": precision}}
    fewer = {"gradient_compression": "one_bit", "memory": {"zero_stage": 2}}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    alone = train(spec_for(tmp_path / "a", data, "dp_replicate=2", parallel=fewer, **sections), 2)
    spec = spec_for(tmp_path / "b", data, layout, parallel=fewer, **sections)
    trained = train(spec, 4, save_at=2)
    cut = "dp_shard" in layout or "tp" in layout
    assert trained.losses[0] == pytest.approx(alone.losses[0], rel=2e-3)
    assert trained.losses[1] == pytest.approx(alone.losses[1], rel=1e-2 if cut else 2e-3)
    resumed = train(spec, 2)
    assert resumed.losses == trained.losses[2:]
    for name, value in trained.state.items():
        assert torch.equal(resumed.state[name], value), name


@pytest.mark.parametrize(
    ("layout", "q_lora_rank"),
    [
        pytest.param("tp=2", 10, marks=SLOW),
        pytest.param("tp=2", 0, marks=SLOW),
        pytest.param("cp=2,tp=2,ep=2", 10, marks=SLOW),
        pytest.param("pp=2,tp=2 zbv", 10, marks=SLOW),
        pytest.param("dp_shard=2,tp=4", 0, marks=SLOW),
    ],
)
def test_latent_attention_trains_as_in_one_process(layout, q_lora_rank, data, tmp_path):
    latent = {"qk_norm": "none", "kv_lora_rank": 12, "q_lora_rank": q_lora_rank,
              "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}  # fmt: skip
    sections = {**SECTIONS, "model": {**SECTIONS["model"], **latent}}
    alone = train(spec_for(tmp_path, data, "", **sections), 4)
    trained = train(spec_for(tmp_path, data, layout, **sections), 4)
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    check_gradients(trained, alone)


@pytest.mark.parametrize(
    ("layout", "memory"),
    [
        ("tp=2", {}),
        pytest.param("cp=2,tp=2,ep=2", {"recompute": "selective"}, marks=SLOW),
        pytest.param("pp=2,tp=2 zbv", {}, marks=SLOW),
        pytest.param("pp=2 zbv", {"recompute": "full"}, marks=SLOW),
        pytest.param("pp=2,dp_shard=2,ep=2", {}, marks=SLOW),
        pytest.param("cp=2", {}, marks=SLOW),
    ],
)
@pytest.mark.parametrize("norm_after", [True, pytest.param(False, marks=SLOW)])
def test_features_of_model_families_train_as_in_one_process(
    layout, memory, norm_after, data, tmp_path
):
    model = {**SECTIONS["model"], **FEATURES, "norm_after": norm_after, "first_k_dense": 1}
    sections = {**SECTIONS, "model": model}
    alone = train(spec_for(tmp_path, data, "", **sections), 4)
    parallel = {"memory": memory}
    trained = train(spec_for(tmp_path, data, layout, parallel=parallel, **sections), 4)
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    assert "layers.1.attention.wo.bias" in trained.gradients
    check_gradients(trained, alone)


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
    check_gradients(trained, alone)


def passes_on_rank(spec: JobSpec, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Of a step of five micro-batches: weight gradients that each second pass computed, weights in
    each stage that can be delayed, and how often FSDP reduced each parameter's gradient."""
    runtime = start(spec.train.timeout_seconds)
    job = build_job(spec, runtime)
    restore(job)
    found: list[int] = []
    reduced: Counter[Any] = Counter()
    run, reduce = WeightGradStore.compute, _fsdp_param_group.foreach_reduce

    def run_and_count(store: WeightGradStore, key: object) -> None:
        found.append(store.count(key))
        run(store, key)

    def reduce_and_count(parameters: list[Any], *args: Any, **kwargs: Any) -> Any:
        reduced.update(map(id, parameters))
        return reduce(parameters, *args, **kwargs)

    WeightGradStore.compute = run_and_count
    _fsdp_param_group.foreach_reduce = reduce_and_count
    batch = torch.randint(300, (1, spec.data.seq_len + 1))
    job.forward_backward([batch] * 5, 5 * batch.numel())
    there = [
        sum(isinstance(m, nn.Linear) + 3 * isinstance(m, GroupedExperts) for m in stage.modules())
        for stage in job.parallel_model.stages.values()
    ]
    runtime.close()
    return found, there, list(reduced.values())


@pytest.mark.parametrize("once", [False, pytest.param(True, marks=SLOW)])
def test_second_passes_have_the_work_and_fsdp_reduces_after_them(once: bool, data, tmp_path):
    parallel = {"memory": {"zero_stage": 1 if once else 3}}
    # Where gradients are of two dtypes, FSDP reduces them only if it has made them one.
    sections = {**SECTIONS, "precision": {"compute": "bfloat16"}}
    spec = spec_for(tmp_path, data, "pp=2,dp_shard=2 zbv", parallel=parallel, **sections)
    for found, there, reduced in run_ranks(partial(passes_on_rank, spec), 4, group=False):
        assert Counter(found) == Counter(5 * there)
        assert set(reduced) == {1} if once else 1 < min(reduced) <= max(reduced) <= 5


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        pytest.param("pp=2,cp=2", {}, marks=SLOW),
        ("pp=2", {"pipeline": {"stages_per_rank": 2}}),
        pytest.param("tp=2,ep=2", {}, marks=SLOW),
    ],
)
def test_balance_over_the_global_batch(layout: str, parallel, data, tmp_path):
    sections = {**SECTIONS, "moe": {**SECTIONS["moe"], "aux_loss_scope": "global_batch"}}
    alone = train(spec_for(tmp_path, data, "", **sections), 2)
    trained = train(spec_for(tmp_path, data, layout, parallel=parallel, **sections), 2)
    assert trained.losses == pytest.approx(alone.losses, rel=1e-5)
    check_gradients(trained, alone)


def counting(micro_batch_size: int) -> dict[str, Any]:
    """A run whose auxiliary loss weighs much."""
    moe = {"num_experts": 8, "aux_loss_coeff": 1.0, "aux_loss_scope": "previous_step"}
    batch = {"global_batch_size": 8, "micro_batch_size": micro_batch_size}
    return {**SECTIONS, "moe": moe, "batch": batch}


def test_balance_over_the_step_before_depends_on_no_layout(data, tmp_path):
    alone = train(spec_for(tmp_path, data, "", **counting(8)), 3)
    for layout, size in (("", 2), ("dp_shard=2,ep=2", 4), ("dp_shard=4,ep=2", 1)):
        spec = spec_for(tmp_path, data, layout, **counting(size))
        trained = train(spec, 3)
        assert trained.losses == pytest.approx(alone.losses, rel=1e-6, abs=0), (layout, size)
        assert trained.progress.expert_counts == alone.progress.expert_counts
    assert [sum(row) for row in alone.progress.expert_counts] == [8 * 32 * 2] * 3


def test_the_counts_of_the_step_before_are_resumed(data, tmp_path):
    spec = spec_for(tmp_path, data, "", **counting(4))
    straight = train(spec, 4)
    train(spec, 2, save_at=2)
    assert train(spec, 2).losses == straight.losses[2:]


@pytest.mark.parametrize(
    "layout",
    [
        *BITWISE,
        *(pytest.param(x, marks=SLOW) for x in LAYOUTS + MORE if x not in BITWISE),
    ],
)
def test_a_resume_on_the_same_ranks_has_the_same_bits(layout: str, runs, data, tmp_path):
    run = runs(layout)
    spec = spec_for(tmp_path, data, layout, checkpoint={"path": str(run.root)}, **SECTIONS)
    resumed = train(spec, STEPS - SAVED)
    assert resumed.losses == run.trained.losses[SAVED:]
    for name, expected in run.trained.state.items():
        assert torch.equal(resumed.state[name], expected), name


@SLOW
def test_any_layout_loads_what_any_other_saved(runs, data, tmp_path):
    """Parameters and moments bitwise, on every rank of the layout that loads."""
    names = ["dp_shard=1", *LAYOUTS]
    pairs = [(a, b) for a in names for b in [*names, *MORE] if a != b]
    saved = {a: runs(a) for a in names}
    there_and_back = [("pp=2", "pp=2 zbv"), ("pp=2 zbv", "pp=2"), ("pp=2 zbv", "pp=4")]
    for a, b in [*there_and_back, *random.Random(1).sample(pairs, 60)]:
        spec = spec_for(tmp_path, data, b, **SECTIONS)
        topology = topology_of(b)
        manifest = ckpt.read_manifest(saved[a].root)
        ranks = []
        for rank in range(topology.world):
            arrays = empty_arrays(spec, topology, rank)
            ckpt.load(saved[a].root, manifest, arrays, extra="ignore")  # random states
            ranks.append([piece for array in arrays for piece in slices(array)])
        for name, value in whole(ranks).items():
            assert torch.equal(value, saved[a].trained.saved[name]), f"{a} to {b}: {name}"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("pp=2,dp_shard=2,ep=2", "tp=2"), ("pp=2", "pp=2 zbv"), ("pp=2 zbv", "pp=2"),
        pytest.param("tp=2,ep=2", "pp=3,dp_replicate=2", marks=SLOW),
        pytest.param("cp=2", "pp=2,tp=2", marks=SLOW),
    ],
)  # fmt: skip
def test_a_run_goes_on_under_another_layout(before: str, after: str, runs, data, tmp_path):
    run, alone = runs(before), runs("dp_shard=1").trained
    checkpoint = {"path": str(run.root), "reshard_on_load": True}
    spec = spec_for(tmp_path, data, after, checkpoint=checkpoint, **SECTIONS)
    resumed = train(spec, STEPS - SAVED)
    assert resumed.losses == pytest.approx(alone.losses[SAVED:], rel=1e-5)
