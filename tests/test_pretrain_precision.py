"""Products in bfloat16, everything that adds up in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moe.experts import GroupedExperts
from pretrain.checkpoint import restore
from pretrain.job import build_job
from pretrain.runtime import start
from pretrain.spec import JobSpec
from router import TopKRouter
from tests.dist import run_ranks
from tests.jobs import data_of, prepare_job
from tests.layouts import relative_error, spec_for, train

SECTIONS: dict[str, Any] = {
    "model": {"num_kv_heads": 4},
    "moe": {"num_experts": 8, "d_ff": 32, "expert_bias": True, "num_shared_experts": 1},
    "train": {"steps": 20, "global_batch_size": 5},
    "optimizer": {"eps": 1e-4},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("precision")))


def sections(precision: str) -> dict[str, Any]:
    return {**SECTIONS, "train": {**SECTIONS["train"], "precision": precision}}


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
        if isinstance(module, nn.Linear | nn.RMSNorm | TopKRouter):
            # Not experts: their weighted outputs are added up in float32.
            module.register_forward_hook(
                lambda m, _, out: note(m, [t for t in tree_leaves(out) if isinstance(t, Tensor)])
            )
    batch = torch.randint(300, (2, spec.data.seq_len + 1))
    result = job.forward_backward([batch], batch.numel())
    seen["loss"] = {result.loss_sum.dtype}
    seen["gradients"] = {p.grad.dtype for p in job.model.parameters()}
    runtime.close()
    return seen


@pytest.mark.parametrize("layout", ["dp_shard=1", "dp_shard=2,ep=2"])
def test_what_is_computed_in_which_precision(layout, data, tmp_path):
    spec = spec_for(tmp_path, data, layout, **sections("bfloat16"))
    world = spec.parallel.dp_shard
    for seen in run_ranks(partial(dtypes_on_rank, spec), world, group=False):
        rough, exact = {torch.bfloat16}, {torch.float32}
        assert seen == {
            "Linear": rough, "RMSNorm": rough, "GroupedExperts": rough, "TopKRouter": exact,
            "loss": {torch.float64}, "gradients": exact,
        }  # fmt: skip


@pytest.mark.parametrize(
    "layout",
    [
        "dp_shard=1", "dp_shard=2,ep=2", "pp=2", "tp=2",
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("dp_shard=2", "cp=2,ep=2")),
    ],
)  # fmt: skip
def test_bfloat16_follows_float32_and_resumes_with_the_same_bits(layout, data, tmp_path):
    exact = train(spec_for(tmp_path, data, "", **sections("float32")), 6)
    spec = spec_for(tmp_path, data, layout, run_dir=str(tmp_path / "b"), **sections("bfloat16"))
    rough = train(spec, 6, save_at=4)
    # bfloat16 has 8 bits, and tokens between two experts go to the other.
    assert rough.losses == pytest.approx(exact.losses, rel=1e-2)
    assert rough.losses[0] == pytest.approx(exact.losses[0], rel=2e-3)
    assert rough.losses != pytest.approx(exact.losses, rel=1e-7)
    for name, expected in exact.gradients.items():
        if not name.endswith("router.weight"):
            error = relative_error(rough.gradients[name], expected)
            assert error < 0.2, f"gradient of {name}: {error}"
    assert {value.dtype for value in rough.state.values()} == {torch.float32}
    resumed = train(spec, 2)
    assert resumed.losses == rough.losses[4:]
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
    fields["train"] = {**fields["train"], "global_batch_size": 10}
    fields["parallel"] = {"zero": 1 if once else 3}
    plain = train(spec_for(tmp_path, data, "pp=2,dp_shard=2", **fields), 1)
    again = train(spec_for(tmp_path, data, f"pp=2,dp_shard=2 {schedule}", **fields), 1)
    assert again.losses == pytest.approx(plain.losses, rel=1e-6)
    for name, expected in plain.gradients.items():
        # In float32: of sums in bfloat16 three digits would be left.
        assert relative_error(again.gradients[name], expected) < 1e-6, name
