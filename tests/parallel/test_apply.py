"""Expert parallelism and FSDP on real gloo ranks, against one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe import MoEConfig, MoELayer
from parallel import (
    ParallelDims,
    ShardLayout,
    Topology,
    apply_expert_parallel,
    apply_fsdp,
    clip_grad_norm,
    expert_parameter_names,
)
from parallel.expert_parallel import ExpertParallelModule, expert_modules
from parallel.layout import box_shape, dense_splits, expert_splits
from tests.support.ranks import run_ranks

D, F, E, K = 16, 24, 8, 2
WEIGHTS = ("w_gate", "w_up", "w_down")


class Block(nn.Module):
    """A residual layer, so that gradients pass both through and around the experts."""

    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D)
        sizes = {"d_model": D, "d_ff": F, "num_experts": E, "top_k": K, "num_shared_experts": 1}
        self.moe = MoELayer(MoEConfig(**{**sizes, **fields}))

    def forward(self, x):
        out = self.moe(self.proj(x))
        return x + out.hidden, out.aux


class Model(nn.Module):
    def __init__(self, **fields: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(**fields), Block(**fields)])
        self.head = nn.Linear(D, 3, bias=False)  # fewer rows than ranks: some hold none

    def forward(self, x):
        loss = x.new_zeros(())
        for layer in self.layers:
            x, aux = layer(x)
            loss = loss + aux.aux_loss * x.shape[0]
        return self.head(x), loss


def make_model(case: str = "") -> Model:
    torch.manual_seed(7)
    drop_policy = {"little room": "reroute", "less room": "probs"}.get(case)
    fields = {"capacity": {"policy": "fixed", "capacity_factor": 0.75, "drop_policy": drop_policy}}
    model = Model(**fields) if drop_policy else Model()
    with torch.no_grad():
        for layer in model.layers:
            layer.moe.router.weight.mul_(20)
            layer.moe.router.weight[5] = 0
            layer.moe.router.weight[5, 0] = -1000.0  # nobody's choice where x[0] > 0
    return model


def batches(case: str, world: int) -> list[torch.Tensor]:
    torch.manual_seed(11)
    sizes = {
        "even": [8] * world,
        "a rank without tokens": [0, 13, 5, 9][:world],
        "no tokens at all": [0] * world,
        "one token": [0] * (world - 1) + [1],
        "little room": [0, 13, 5, 9][:world],
        "less room": [16, 13, 0, 9][:world],
    }[case]
    return [torch.randn(n, D) for n in sizes]


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, aux = model(x)
    return y.square().sum() + 0.01 * aux


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_options(model: nn.Module, options: dict) -> None:
    """What FSDP was told, which changes no number and so must be looked at."""
    modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
    assert modules
    for module in modules:
        policy = fully_shard.state(module)._fsdp_param_group
        if policy is not None:
            assert policy.offload_policy.__class__ is (
                CPUOffloadPolicy if options.get("offload") else OffloadPolicy
            )
    ahead, layers = options.get("prefetch", 0), list(model.layers)
    for i, layer in enumerate(layers):
        state = fully_shard.state(layer)
        after, before = layers[i + 1 : i + 1 + ahead], layers[max(i - ahead, 0) : i]
        for states, others in (
            (state._states_to_forward_prefetch, after),
            (state._states_to_backward_prefetch, before),
        ):
            expected = {
                id(fully_shard.state(m)) for o in others for m in o.modules()
                if isinstance(m, FSDPModule)
            }  # fmt: skip
            assert {id(s) for s in states} == expected


KEPT = {"reshard_after_forward": False}


def on_rank(rank: int, topology: Topology, case: str, options: dict):
    dims = ParallelDims.build(topology, "cpu")
    model = make_model(case)
    apply_expert_parallel(model, dims.ep_mesh)
    apply_fsdp(model, dims, blocks=model.layers, **options)
    check_options(model, options)
    experts = expert_parameter_names(model)
    x = batches(case, topology.world)[rank]
    loss = loss_of(model, x)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    for name, p in model.named_parameters():
        splits = (expert_splits if name in experts else dense_splits)(p.ndim)
        box = ShardLayout(tuple(p.shape), splits, topology).box(rank)
        if isinstance(p, DTensor):
            shape, offset = compute_local_shape_and_global_offset(
                p.shape, p.device_mesh, p.placements
            )
            assert box_shape(box) == tuple(shape), name
            assert all(a == b[0] for a, b in zip(offset, box, strict=True) if b[0] != b[1]), name
            assert tuple(p.to_local().shape) == tuple(shape), name
        else:
            assert box == tuple((0, size) for size in p.shape), name
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    return float(total), grads if rank == 0 else None


@pytest.mark.parametrize(
    ("topology", "case", "options"),
    [
        (Topology(dp_shard=2, ep=2), "even", {}),
        (Topology(dp_shard=2, ep=2), "a rank without tokens", {}),
        (Topology(dp_shard=2, ep=2), "no tokens at all", {}),
        (Topology(dp_shard=2, ep=2), "one token", KEPT),
        (Topology(dp_shard=2, ep=2), "little room", {}),
        (Topology(dp_shard=4, ep=4), "less room", {}),
        (Topology(dp_shard=2), "a rank without tokens", {}),
        (Topology(dp_replicate=2), "a rank without tokens", {}),
        (Topology(dp_shard=4, ep=4), "a rank without tokens", {}),
        (Topology(dp_shard=4, ep=2), "a rank without tokens", {}),
        (Topology(dp_shard=4, ep=2), "one token", {}),
        (Topology(dp_replicate=2, dp_shard=2, ep=2), "a rank without tokens", KEPT),
        (Topology(dp_shard=4, ep=2), "even", {"prefetch": 1}),
        (Topology(dp_shard=2, ep=2), "even", {"prefetch": 2, "offload": True}),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_process(topology, case, options):
    reference = make_model(case)
    expected_loss = 0.0
    for x in batches(case, topology.world):
        loss = loss_of(reference, x)
        loss.backward()
        expected_loss += float(loss.detach())

    results = run_ranks(on_rank, topology.world, topology, case, options)

    for loss, _ in results:
        assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-12)
    grads = results[0][1]
    for name, parameter in reference.named_parameters():
        expected = parameter.grad
        error = (grads[name] - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < 1e-5, f"{name}: {error}"
    if case != "no tokens at all":
        assert reference.head.weight.grad.norm() > 0


def test_experts_are_found_wherever_modules_keep_them():
    # A runtime-checkable Protocol would not see them from Python 3.12 on.
    model = make_model()
    assert len(list(expert_modules(model))) == 2
    names = expert_parameter_names(model)
    assert names == {f"layers.{i}.moe.experts.{w}" for i in (0, 1) for w in WEIGHTS}
    with pytest.raises(TypeError):
        isinstance(model, ExpertParallelModule)


def uneven_experts(rank: int):
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = MoELayer(MoEConfig(d_model=D, d_ff=F, num_experts=7, top_k=K))
    with pytest.raises(ValueError, match=r"num_experts \(7\) must be a multiple of the ranks"):
        apply_expert_parallel(layer, dims.ep_mesh)
    with pytest.raises(ValueError, match=r"dp_shard=4 = 4 ranks\) must have the world size \(2\)"):
        ParallelDims.build(Topology(dp_shard=4), "cpu")
    even = MoELayer(MoEConfig(d_model=D, d_ff=F, num_experts=8, top_k=K))
    apply_expert_parallel(even, dims.ep_mesh)
    with pytest.raises(ValueError, match=r"dims \(None\) must be the model's ParallelDims"):
        clip_grad_norm(even, None, 1.0)


def test_experts_must_divide_and_the_world_must_match():
    run_ranks(uneven_experts, 2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_norm_of_a_model_in_few_bits_is_a_number_of_many(dtype):
    model = nn.Sequential(nn.Linear(D, 4096, bias=False), nn.Linear(4096, D, bias=False)).to(dtype)
    for parameter in model.parameters():
        parameter.grad = 300 + 100 * torch.randn_like(parameter)
    expected = float(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm())
    assert expected > torch.finfo(torch.float16).max
    assert clip_grad_norm(model, None, 1e9) == pytest.approx(expected, rel=1e-4)
