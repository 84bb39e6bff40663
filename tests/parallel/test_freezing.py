"""Any parameters frozen, on several ranks: gradients, norms and steps of one process."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel import (
    ExactSums,
    ParallelDims,
    Topology,
    WeightGradStore,
    apply_delayed_weight_grad,
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_parallel,
    clip_grad_norm,
)
from tests.moe.adapters.models import Model, batch, loss_of, make_model
from tests.support.ranks import run_ranks

FROZEN = {
    "nothing": [],
    "routers": ["*router*"],
    "experts": ["*experts*"],
    "a matrix of experts": ["*experts.w_up"],
    "one layer's down": ["blocks.0.moe.experts.w_down"],
    "inputs": ["embed*", "*attention*"],
    "all but routers": ["embed*", "*attention*", "*experts*", "head*"],
    "all but the head": ["embed*", "blocks*"],
    "the first block": ["embed*", "blocks.0*"],
    "biases": ["*bias", "*.b_*"],
}
Result = tuple[float, dict[str, Tensor | None]]


def frozen(model: Model, patterns: list[str]) -> Model:
    for name, parameter in model.named_parameters():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    return model


def results(
    model: Model, batches: list[Tensor], dims: ParallelDims | None, exact: ExactSums | None = None
) -> Result:
    if exact is not None:
        exact.begin()
    for x in batches:
        loss_of(model(x)).backward()
    if exact is not None:
        exact.finish()
    before = {name: full(p) for name, p in model.named_parameters()}
    norm = clip_grad_norm(model, dims, 0.5 if exact is None else math.inf)
    grads = {n: None if p.grad is None else full(p.grad) for n, p in model.named_parameters()}
    torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1).step()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (grads[name] is not None), name
        moved = not torch.equal(full(parameter), before[name])
        assert moved == (grads[name] is not None and bool(grads[name].any())), name
    return norm, grads


def full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def on_rank(rank: int, degrees: dict[str, int], fields: dict[str, Any], exact: bool,
            cases: list[str]) -> list[Result]:  # fmt: skip
    dims = ParallelDims.build(Topology(**degrees), "cpu")
    answers = []
    for case in cases:
        model = frozen(make_model(**fields), FROZEN[case])
        sums = ExactSums(8) if exact else None
        apply_expert_parallel(model, dims.ep_mesh)
        apply_fsdp(model, dims, blocks=list(model.blocks), exact=sums)
        answers.append(results(model, [batch(rank)], dims, sums))
    return answers


EP, FSDP, BOTH = {"dp_shard": 2, "ep": 2}, {"dp_shard": 2}, {"dp_shard": 4, "ep": 2}


@pytest.mark.parametrize(
    ("degrees", "fields"),
    [
        (EP, {"backend": "packed", "ffn_bias": True}),
        (FSDP, {"backend": "grouped_mm"}),
        pytest.param(EP, {"backend": "loop"}, marks=pytest.mark.slow),
        pytest.param(BOTH, {"backend": "grouped_mm"}, marks=pytest.mark.slow),
        pytest.param(BOTH, {"backend": "packed", "recompute_experts": True},
                     marks=pytest.mark.slow),
        pytest.param({"dp_replicate": 2}, {"num_shared_experts": 1}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_frozen_parameters_have_no_gradient_and_all_others_have_theirs(degrees, fields):
    world = degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1)
    cases = list(FROZEN)
    ranks = run_ranks(on_rank, world, degrees, fields, False, cases)
    for number, case in enumerate(cases):
        model = frozen(make_model(**fields), FROZEN[case])
        norm, grads = results(model, [batch(rank) for rank in range(world)], None)
        assert norm > 0.5, "no gradient was clipped"
        for answers in ranks:
            assert answers[number][0] == pytest.approx(norm, rel=1e-5), case
            assert answers[number][1].keys() == grads.keys()
            for name, grad in grads.items():
                mine = answers[number][1][name]
                assert (mine is None) == (grad is None), (case, name)
                if grad is not None:
                    torch.testing.assert_close(mine, grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "degrees", [EP, FSDP, pytest.param(BOTH, marks=pytest.mark.slow)], ids=["ep", "fsdp", "both"]
)
def test_exact_sums_have_the_same_bits_on_any_layout(degrees):
    cases = ["routers", "experts", "a matrix of experts", "all but routers", "the first block"]
    world = degrees["dp_shard"]
    ranks = run_ranks(on_rank, world, degrees, {}, True, cases)
    for number, case in enumerate(cases):
        model, sums = frozen(make_model(), FROZEN[case]), ExactSums(8)
        for layer in (block.moe for block in model.blocks):
            assert layer.experts.unit_sums is None
        sums.use_experts(model, lambda _: False)
        sums.use_unsharded(model)
        _, grads = results(model, [batch(rank) for rank in range(world)], None, sums)
        for name, grad in grads.items():
            mine = ranks[0][number][1][name]
            assert (mine is None) == (grad is None), (case, name)
            assert grad is None or torch.equal(mine, grad), (case, name)


@pytest.mark.parametrize("case", FROZEN)
@pytest.mark.parametrize("gated", [True, False])
def test_delayed_gradients_of_what_is_behind_frozen_inputs(case, gated):
    """A gradient that would be delayed until a backward that never comes is computed at once."""
    fields = {"backend": "grouped_mm", "activation": "swiglu" if gated else "gelu"}
    model, twin = (frozen(make_model(**fields), FROZEN[case]) for _ in range(2))
    store = apply_delayed_weight_grad(model)
    assert isinstance(store, WeightGradStore)
    for model_ in (model, twin):
        with store.collect("key" if model_ is model else None):
            loss_of(model_(batch(0))).backward()
    store.compute("key")
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None) == (not q.requires_grad), name
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def frozen_under_tensor_parallelism(rank: int) -> list[bool]:
    dims = ParallelDims.build(Topology(tp=2), "cpu")
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Tanh())
    model[0].requires_grad_(False)
    apply_tensor_parallel(model, dims.tp_mesh, {"0": "columns", "1": "rows"})
    apply_fsdp(model, dims, blocks=[])
    model(torch.randn(1, 2, 8)).sum().backward()
    return [p.requires_grad and p.grad is not None for p in model.parameters()]


def test_tensor_parallelism_keeps_frozen_weights_frozen():
    assert run_ranks(frozen_under_tensor_parallelism, 2) == [[False, True]] * 2
