"""Products in bfloat16 or float16, everything that adds up in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moe.experts.grouped import GroupedExperts
from pretrain.checkpoint.resume import restore
from pretrain.job import build_job
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from router import TopKRouter
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import Trained, relative_error, spec_for, train
from tests.support.ranks import run_ranks

SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4},
    "moe": {"num_experts": 8, "d_ff": 32, "expert_bias": True, "num_shared_experts": 1},
    "train": {"steps": 20},
    "batch": {"global_batch_size": 5},
    "optimizer": {"eps": 1e-4},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("precision")))


def sections(precision: str) -> dict[str, Any]:
    # With this scale nothing overflows; how one is found is tested elsewhere.
    return {**SECTIONS, "precision": {"compute": precision, "loss_scale": 4096}}


def dtypes_on_rank(spec: JobSpec, rank: int) -> dict[str, set[torch.dtype]]:
    """What modules hold while they compute, and give, by their kind."""
    runtime = start(60.0)
    job = build_job(spec, runtime)
    restore(job)
    seen: dict[str, set[torch.dtype]] = {}

    def note(module: nn.Module, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_floating_point():
                kind = type(module).__name__.removeprefix("FSDP")
                seen.setdefault(kind, set()).add(tensor.dtype)

    for module in job.model.modules():
        if isinstance(module, nn.Linear | nn.RMSNorm | TopKRouter | GroupedExperts):
            module.register_forward_pre_hook(
                lambda m, _: note(m, list(m.parameters(recurse=False)))
            )
            module.register_forward_hook(
                lambda m, _, out: note(m, [t for t in tree_leaves(out) if isinstance(t, Tensor)])
            )
    batch = torch.randint(300, (2, spec.data.seq_len + 1))
    result = job.forward_backward([batch], batch.numel())
    seen["loss"] = {result.loss_sum.dtype}
    seen["gradients"] = {p.grad.dtype for p in job.model.parameters()}
    runtime.close()
    return seen


@pytest.mark.parametrize(
    ("layout", "precision"),
    [("dp_shard=1", "bfloat16"), ("dp_shard=2,ep=2", "bfloat16"), ("dp_shard=2,ep=2", "float16")],
)
def test_what_is_computed_in_which_precision(layout, precision, data, tmp_path):
    spec = spec_for(tmp_path, data, layout, **sections(precision))
    world = spec.parallel.dp_shard
    for seen in run_ranks(partial(dtypes_on_rank, spec), world, group=False):
        rough, exact = {getattr(torch, precision)}, {torch.float32}
        assert seen == {
            "Linear": rough, "RMSNorm": rough, "GroupedExperts": rough, "TopKRouter": exact,
            "loss": {torch.float64}, "gradients": exact,
        }  # fmt: skip


@pytest.fixture(scope="module")
def exact(data, tmp_path_factory) -> Trained:
    return train(spec_for(tmp_path_factory.mktemp("exact"), data, "", **sections("float32")), 6)


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        slow("dp_shard=1", "bfloat16"), ("dp_shard=2,ep=2", "bfloat16"), ("pp=2", "bfloat16"),
        slow("tp=2", "bfloat16"), slow("dp_shard=2", "bfloat16"), slow("cp=2,ep=2", "bfloat16"),
        slow("dp_shard=1", "float16"), slow("pp=2", "float16"), slow("dp_shard=2", "float16"),
        slow("tp=2", "float16"), slow("cp=2,ep=2", "float16"),
        slow("pp=2,dp_shard=2,ep=2", "float16"),
    ],
)  # fmt: skip
def test_half_the_bits_follow_float32_and_resume_with_the_same(
    layout, precision, data, exact, tmp_path
):
    spec = spec_for(tmp_path, data, layout, run_dir=str(tmp_path / "b"), **sections(precision))
    rough = train(spec, 6, save_at=4)
    # bfloat16 has 8 bits and float16 has 11, and tokens between two experts go to the other.
    first = 2e-3 if precision == "bfloat16" else 2.5e-4
    assert rough.losses == pytest.approx(exact.losses, rel=1e-2)
    assert rough.losses[0] == pytest.approx(exact.losses[0], rel=first)
    assert rough.losses != pytest.approx(exact.losses, rel=1e-7)
    assert {value.dtype for value in rough.state.values()} == {torch.float32}
    assert len(rough.attempts) == 6, "no step is skipped"
    resumed = train(spec, 2)
    assert resumed.losses == rough.losses[4:]
    assert resumed.progress.loss_scale == (4096 if precision == "float16" else None)
    for name, value in rough.state.items():
        assert torch.equal(resumed.state[name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "backend", "once"),
    [
        ("zbv", "auto", False), ("zbv", "grouped_mm", True),
        ("dualpipev", "auto", True), ("dualpipev", "grouped_mm", False),
    ],
)  # fmt: skip
def test_a_backward_in_two_passes_adds_up_as_one_does(schedule, backend, once, data, tmp_path):
    fields = sections("bfloat16")
    fields["model"] = {**fields["model"], "num_layers": 4}
    fields["moe"] = {**fields["moe"], "backend": backend}
    fields["batch"] = {"global_batch_size": 10}
    fields["parallel"] = {"memory": {"zero_stage": 1 if once else 3}}
    plain = train(spec_for(tmp_path, data, "pp=2,dp_shard=2", **fields), 1)
    again = train(spec_for(tmp_path, data, f"pp=2,dp_shard=2 {schedule}", **fields), 1)
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, expected in plain.gradients.items():
        # In float32: of sums in bfloat16 three digits would be left.
        assert relative_error(again.gradients[name], expected) < 1e-6, name


@pytest.fixture(scope="module")
def exact_without_choice(data, tmp_path_factory) -> Trained:
    return train(spec_for(tmp_path_factory.mktemp("all"), data, "", **all_experts("float32")), 1)


def all_experts(precision: str) -> dict[str, Any]:
    """Every token takes every expert: no choice turns on a rounding."""
    return sections(precision) | {
        "moe": SECTIONS["moe"] | {"top_k": SECTIONS["moe"]["num_experts"]}
    }


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("dp_shard=2,ep=2", "bfloat16"), slow("pp=2", "bfloat16"), slow("tp=2", "bfloat16"),
        ("pp=2", "float16"), slow("dp_shard=1", "float16"), slow("dp_shard=2,ep=2", "float16"),
        slow("tp=2", "float16"), slow("cp=2,ep=2", "float16"),
    ],
)  # fmt: skip
def test_gradients_have_as_many_bits_as_products(
    layout, precision, data, exact_without_choice, tmp_path
):
    rough = train(spec_for(tmp_path, data, layout, **all_experts(precision)), 1)
    tolerance = 6e-2 if precision == "bfloat16" else 8e-3
    for name, expected in exact_without_choice.gradients.items():
        error = relative_error(rough.gradients[name], expected)
        assert error < tolerance, f"gradient of {name}: {error}"
