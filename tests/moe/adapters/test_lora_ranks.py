"""Adapters on several ranks, against one process: every step's loss, norm and adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe
from parallel import (
    ParallelDims,
    Topology,
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_parallel,
    clip_grad_norm,
)
from tests.moe.adapters.models import EVERYTHING, Model, adapted, batch, loss_of, make_model
from tests.support.ranks import run_ranks

Steps = list[tuple[float, float, dict[str, Tensor]]]
STEPS = 3


def train(model: Model, batches: list[Tensor], dims: ParallelDims | None) -> Steps:
    """Of each step the loss, the gradients' norm and the adapters after it."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses = []
        for x in batches:
            losses.append(loss_of(model(x)))
            losses[-1].backward()
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        norm = clip_grad_norm(model, dims, 0.5)
        optimizer.step()
        loss = sum(loss.item() for loss in losses)
        steps.append((loss, norm, moe.lora_state_dict(model, full=True)))
    return steps


def on_rank(rank: int, degrees: dict[str, int], dtype: torch.dtype, fields: dict[str, Any],
            options: dict[str, Any]) -> Steps:  # fmt: skip
    dims = ParallelDims.build(Topology(**degrees), "cpu")
    model = adapted(dtype, EVERYTHING[:3], **fields)
    apply_expert_parallel(model, dims.ep_mesh)
    apply_fsdp(model, dims, blocks=list(model.blocks), **options)
    state = moe.lora_state_dict(model)
    moe.load_lora_state_dict(model, state)  # shards of one's own
    whole = moe.lora_state_dict(adapted(dtype, EVERYTHING[:3], **fields))
    moe.load_lora_state_dict(model, whole)  # and whole tensors
    return train(model, [batch(rank, dtype)], dims)


EP, FSDP, BOTH = {"dp_shard": 2, "ep": 2}, {"dp_shard": 2}, {"dp_shard": 4, "ep": 2}
slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("degrees", "fields"),
    [
        (EP, {"backend": "packed"}),
        (FSDP, {"backend": "grouped_mm", "recompute_experts": True}),
        (BOTH, {"backend": "packed"}),
        pytest.param({"dp_replicate": 2}, {"backend": "loop"}, marks=slow),
        pytest.param(EP, {"backend": "loop", "dispatcher": "all_gather"}, marks=slow),
        pytest.param(EP, {"backend": "grouped_mm", "overlap_chunks": 2}, marks=slow),
        pytest.param(FSDP, {"backend": "packed", "num_shared_experts": 1}, marks=slow),
        pytest.param({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, {}, marks=slow),
    ],
)
def test_ranks_train_adapters_as_one_process_does(degrees, fields):
    world = degrees.get("dp_shard", 1) * degrees.get("dp_replicate", 1)
    ranks = run_ranks(on_rank, world, degrees, torch.float32, fields, {})
    model = adapted(torch.float32, EVERYTHING[:3], **fields)
    expected = train(model, [batch(rank) for rank in range(world)], None)
    for step, (loss, norm, state) in enumerate(expected):
        assert sum(steps[step][0] for steps in ranks) == pytest.approx(loss, rel=1e-5)
        for steps in ranks:
            assert steps[step][1] == pytest.approx(norm, rel=1e-5)
            for name, tensor in state.items():
                torch.testing.assert_close(steps[step][2][name], tensor, rtol=1e-5, atol=1e-5)
    assert expected[0][1] > 0.5, "no gradient was clipped"


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        (FSDP, {}),
        (FSDP, {"also": ["*.o.weight", "*.w_down", "*.router.weight"]}),
        pytest.param(BOTH, {"also": ["*.o.bias", "*.w_down"]}, marks=slow),
        pytest.param(BOTH, {"compute_dtype": torch.bfloat16}, marks=slow),
        pytest.param(EP, {}, marks=slow),
    ],
)
def test_bfloat16_weights_with_float32_adapters(degrees, options):
    also = options.pop("also", ())
    world, dtype = degrees["dp_shard"], torch.bfloat16
    ranks = run_ranks(on_rank, world, degrees, dtype, {"also": also}, options)
    model = adapted(dtype, EVERYTHING[:3], also)
    expected = train(model, [batch(rank, torch.bfloat16) for rank in range(world)], None)
    for step, (loss, norm, state) in enumerate(expected):
        assert sum(steps[step][0] for steps in ranks) == pytest.approx(loss, rel=2e-2)
        assert ranks[0][step][1] == pytest.approx(norm, rel=1e-2)
        for name, tensor in state.items():
            is_wide = ".lora." in name or "router" in name
            assert ranks[0][step][2][name].dtype == (torch.float32 if is_wide else dtype)
            torch.testing.assert_close(ranks[0][step][2][name], tensor, rtol=0.1, atol=2e-2)


def merged_on_rank(rank: int) -> tuple[Tensor, Tensor, list[str]]:
    dims = ParallelDims.build(Topology(**EP), "cpu")
    model = adapted()
    wanted = model(batch(0))[0]
    apply_expert_parallel(model, dims.ep_mesh)
    errors = []
    for function in (moe.add_lora, lambda m: moe.add_lora(make_spread(dims))):
        try:
            function(model)
        except ValueError as error:
            errors.append(str(error))
    wrapped = make_model()
    wrapped.blocks[1].moe.experts.register_parameter("lora_A", torch.nn.Parameter(torch.ones(12)))
    try:
        apply_expert_parallel(wrapped, dims.ep_mesh)
    except ValueError as error:
        errors.append(str(error))
    assert not any(hasattr(p, "to_local") for p in wrapped.parameters())
    got = moe.merge_lora(model)(batch(0))[0]
    apply_fsdp(sharded := adapted(), ParallelDims.build(Topology(**FSDP), "cpu"), blocks=[])
    try:
        moe.merge_lora(sharded)
    except ValueError as error:
        errors.append(str(error))
    return got, wanted, errors


def make_spread(dims: ParallelDims) -> Model:
    return apply_expert_parallel(make_model(), dims.ep_mesh)


def test_ranks_merge_their_own_experts_and_refuse_what_is_sharded():
    for got, wanted, errors in run_ranks(merged_on_rank, 2):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        assert [error.partition(" must ")[2].partition(":")[0] for error in errors] == [
            "have no adapter", "not be sharded",
            "have the expert as the first dim of each parameter, not w_gate [4, ...] and w_up "
            "[4, ...] and w_down [4, ...] and lora_A [12, ...]",
            "not be sharded by FSDP or tensor parallelism to be merged",
        ]  # fmt: skip


class _Pair(torch.nn.Module):
    """A column-parallel and a row-parallel layer, as attention has them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wq = torch.nn.Linear(8, 12, bias=False)
        self.wo = torch.nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.wq(x).relu())


def make_pair() -> _Pair:
    pair = moe.add_lora(_Pair(), rank=3, on=["dense"])
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in pair.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)
    return pair


def sequences() -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(5))


def tensor_parallel_on_rank(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    dims = ParallelDims.build(Topology(tp=2), "cpu")
    model = torch.nn.Sequential(make_pair(), torch.nn.Tanh())
    plan = {"0": "gathered", "0.wq": "columns", "0.wo": "rows"}
    apply_tensor_parallel(model, dims.tp_mesh, plan)
    assert not model[0].wq.weight.requires_grad
    apply_fsdp(model, dims, blocks=[])
    out = model(sequences().chunk(2, 1)[rank])
    out.square().sum().backward()
    grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.requires_grad}
    return out.detach(), grads


def test_tensor_parallelism_cuts_adapters_as_their_weights():
    model = torch.nn.Sequential(make_pair(), torch.nn.Tanh())
    wanted = model(sequences())
    wanted.square().sum().backward()
    ranks = run_ranks(tensor_parallel_on_rank, 2)
    torch.testing.assert_close(torch.cat([out for out, _ in ranks], 1), wanted.detach())
    for _, grads in ranks:
        assert len(grads) == 4
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=name
            )
