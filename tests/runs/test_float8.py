"""Products in float8 in runs: layouts, resumes, counts, and what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from torch import nn

from moe import Float8Linear, Float8Tally
from parallel import Topology
from pretrain.checkpoint.resume import restore
from pretrain.job import build_job
from pretrain.observe import Events, IntervalEnded, Metrics
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.train import trainer
from tests.support.exact import FEATURES
from tests.support.jobs import data_of, make_spec, prepare_job, tiny
from tests.support.layouts import NoCheckpoints, Trained, relative_error, spec_for, train
from tests.support.ranks import run_ranks

FLOAT8 = {"experts": "float8", "dense": "float8"}
SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4, "num_layers": 4},
    "moe": {"num_experts": 8, "d_ff": 32, "num_shared_experts": 1},
    "train": {"steps": 20},
    "batch": {"global_batch_size": 4},
    "optimizer": {"eps": 1e-4},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("float8")))


def sections(**precision: str) -> dict[str, Any]:
    return {**SECTIONS, "precision": {**FLOAT8, **precision}}


def all_experts(**precision: str) -> dict[str, Any]:
    """With every expert for every token: a rounded score must not change which are chosen."""
    return {**sections(**precision), "moe": {**SECTIONS["moe"], "top_k": 8}}


@pytest.fixture(scope="module")
def one(data, tmp_path_factory) -> Trained:
    return train(spec_for(tmp_path_factory.mktemp("one"), data, "", **sections()), 4)


def error_of(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Of all gradients as one vector."""
    whole = [torch.cat([each[name].flatten() for name in expected]) for each in (found, expected)]
    return relative_error(*whole)


def check_losses(found: Trained, expected: Trained) -> None:
    """Later steps to less: float32 sums in another order, which is another on each kind of
    processor, now and then round a number to the other neighbour in float8."""
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-5)
    assert found.losses == pytest.approx(expected.losses, rel=2e-3)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


# A rank's micro-batches have the tokens, and so the tiles, of one process's.
@pytest.mark.parametrize(
    "layout", ["dp_shard=2", slow("pp=2"), slow("dp_replicate=2"), slow("pp=2 zbv")]
)
def test_layouts_have_the_numbers_of_one_process(layout, data, one, tmp_path):
    found = train(spec_for(tmp_path, data, layout, **sections()), 4)
    check_losses(found, one)
    assert error_of(found.gradients, one.gradients) < 1e-4


def test_expert_parallel_ranks_have_the_numbers_of_larger_micro_batches(data, tmp_path):
    # Experts get the rows of both ranks' micro-batches, of two sequences each, at once.
    runs = []
    for layout, size in (("dp_shard=2,ep=2", 2), ("", 4)):
        few = sections(dense="compute") | {
            "batch": {"global_batch_size": 4, "micro_batch_size": size},
            "moe": {**SECTIONS["moe"], "aux_loss_scope": "previous_step",
                    "dispatch_dtype": "float8"},
        }  # fmt: skip
        folder = tmp_path / str(size)
        runs.append(train(spec_for(tmp_path, data, layout, run_dir=str(folder), **few), 4))
    check_losses(*runs)
    assert error_of(runs[0].gradients, runs[1].gradients) < 1e-4


def test_a_run_differs_from_float32_by_what_float8_rounds_and_resumes(data, one, tmp_path):
    exact, *rounded = (
        train(spec_for(tmp_path, data, "", **all_experts(experts=experts, dense=dense)), 1)
        for experts, dense in (("compute", "compute"), ("compute", "float8"), ("float8", "compute"))
    )
    for part in rounded:  # each of the two is a change by itself
        # A number of float8 has 4 bits, and this model makes much of what bfloat16 rounds as well.
        assert 1e-2 < error_of(part.gradients, exact.gradients) < 0.5
        assert part.losses == pytest.approx(exact.losses, rel=2e-2)
    spec = spec_for(tmp_path, data, "", run_dir=str(tmp_path / "run"), **sections())
    train(spec, 2, save_at=2)
    resumed = train(spec, 2)
    assert resumed.losses == one.losses[2:]
    # A checkpoint is in float32, and another run may go on from it without float8.
    other = spec.model_copy(
        update={
            "precision": spec.precision.model_copy(update={"experts": "compute"}),
            "moe": spec.moe.model_copy(update={"gemm": "compute"}),
        }
    )
    assert train(other, 1).losses == pytest.approx(one.losses[2:3], rel=2e-2)


def layers_and_events(spec: JobSpec, rank: int) -> tuple[Any, ...]:
    runtime = start(60.0)
    published: list[Any] = []
    job = build_job(spec, runtime, Events(published.append))
    progress = restore(job)
    training = trainer.Trainer(job, progress, NoCheckpoints())
    linear = {
        name: isinstance(module, Float8Linear)
        for name, module in job.model.named_modules()
        if isinstance(module, nn.Linear)
    }
    for _ in range(2):
        decision = training.step(0)
    training.end_interval(decision)
    (event,) = (each for each in published if isinstance(each, IntervalEnded))
    runtime.close()
    return linear, event


@pytest.mark.parametrize("layout", ["", slow("pp=2")])
def test_what_is_in_float8_and_what_the_log_counts(layout, data, tmp_path):
    spec = spec_for(tmp_path, data, layout, **sections(compute="bfloat16"))
    world = spec.parallel.pp
    linear: dict[str, bool] = {}
    results = run_ranks(partial(layers_and_events, spec), world, group=False)
    for found, _ in results:
        linear |= found
    event = results[0][1]
    rough = {name for name, float8 in linear.items() if float8}
    assert {name for name in linear if "attention" in name or "ffn" in name} < rough
    assert {name for name in linear if "shared" in name} <= rough
    assert "head" in linear
    assert "head" not in rough
    parts = [f"{part}.{operand}" for part in ("dense", "experts")
             for operand in ("inputs", "weights", "gradients")]  # fmt: skip
    assert event.float8_overflow == dict.fromkeys(parts, 0)
    assert set(event.float8_underflow) == set(parts)
    assert all(0 <= share < 0.2 for share in event.float8_underflow.values())
    assert any(event.float8_underflow.values())
    registry = CollectorRegistry()
    metrics = Metrics(registry, spec, Topology(), "0")
    metrics(event)
    text = generate_latest(registry).decode()
    assert 'convoy_float8_overflowed_tiles_total{operand="weights",part="dense"} 0.0' in text
    assert 'convoy_float8_underflow_ratio{operand="gradients",part="experts"}' in text


def test_an_infinity_is_counted_and_its_step_skipped(data, tmp_path, monkeypatch):
    spec = spec_for(tmp_path, data, "", **sections())
    ((first, skip),) = run_ranks(partial(with_a_bad_weight, spec), 1, group=False)
    assert first == "skip"
    assert skip["experts"][1] > 0  # weights


def with_a_bad_weight(spec: JobSpec, rank: int) -> tuple[str, dict[str, list[int]]]:
    runtime = start(60.0)
    job = build_job(spec, runtime)
    training = trainer.Trainer(job, restore(job), NoCheckpoints())
    with torch.no_grad():
        block = list(job.model.blocks.values())[-1]
        block.moe.experts.w_down[:, 0, 0] = torch.inf
    decision = training.step(0)
    tallies: dict[str, Float8Tally] = dict(job.parallel_model.float8)
    runtime.close()
    return decision.action.value, {k: t.take()[:, 2].tolist() for k, t in tallies.items()}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"precision": {"experts": "float16"}}, "Input should be 'compute' or 'float8'"),
        ({"precision": {"compute": "float8"}},
         "precision.compute (float8) must be float32, bfloat16 or float16: float8 is for"),
        ({"precision": FLOAT8, "train": {"exact": True}},
         "precision.experts (float8) must be compute with train.exact (true)"),
        ({"precision": {"dense": "float8"}, "train": {"exact": True}},
         "precision.dense (float8) must be compute with train.exact (true)"),
        ({"precision": {"dense": "float8"}, "train": {"compile": True}},
         "train.compile (true) must be false with precision.dense (float8)"),
        ({"moe": {"gemm": "float8"}}, "moe.gemm: no such field; it follows from precision.experts"),
        ({"precision": FLOAT8, "moe": {"backend": "grouped_mm"}},
         "moe.backend (grouped_mm) must be auto or loop with precision.experts (float8)"),
        ({"precision": {"compute": "float16"}, "moe": {"dispatch_dtype": "float8"}},
         "moe.dispatch_dtype (float8) must be compute with precision.compute (float16)"),
        ({"moe": {"dispatch_dtype": "float8", "dispatcher": "all_gather"}},
         "moe.dispatch_dtype (float8) must be compute with moe.dispatcher (all_gather)"),
        ({"moe": {"dispatch_dtype": "float8"}, "train": {"exact": True}},
         "moe.dispatch_dtype (float8) must be compute with train.exact (true)"),
        ({"precision": {"dense": "float8"}, "parallel": {"tp": 2}},
         "model.d_ff (48) must be a multiple of 128 x parallel.tp (128 x 2)"),
    ],
)  # fmt: skip
def test_what_is_refused(sections, expected, tmp_path):
    with pytest.raises(ValueError, match=r"must be|should be|no such") as error:
        make_spec(tmp_path, **sections)
    assert expected in str(error.value)


def test_a_dense_model_has_no_experts_in_float8(tmp_path):
    spec = tiny(tmp_path, precision={"experts": "fp8"})
    del spec["moe"]
    with pytest.raises(ValueError, match=r"precision.experts \(float8\) must be compute where"):
        JobSpec.model_validate(spec)


def test_experts_follow_the_precision_and_a_resolved_spec_is_a_spec(tmp_path):
    spec = make_spec(tmp_path, precision=FLOAT8)
    assert spec.moe.gemm == "float8"
    assert JobSpec.model_validate(spec.as_dict()) == spec
    assert make_spec(tmp_path).moe.gemm == "compute"


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, slow(FEATURES)])
def test_tensor_parallel_ranks_cut_weights_between_blocks(more, data, tmp_path):
    wide = sections()
    wide["model"] = {"d_model": 32, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "d_ff": 256}
    wide["model"] |= more
    alone = train(spec_for(tmp_path, data, "", run_dir=str(tmp_path / "a"), **wide), 3)
    found = train(spec_for(tmp_path, data, "tp=2", run_dir=str(tmp_path / "b"), **wide), 3)
    # The routers of two ranks have other tokens each, and the experts' gradients other tiles.
    assert found.losses == pytest.approx(alone.losses, rel=2e-3)
