"""What PyTorch users do to a module, on several ranks: DDP, FSDP2, copies under expert parallelism,
and applying things in the wrong order."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe import MoELayer
from parallel import (
    ParallelDims,
    Topology,
    apply_expert_parallel,
    apply_fsdp,
    apply_recompute,
    apply_tensor_parallel,
)
from tests.moe.test_layer import D, make_layer
from tests.moe.test_ordinary import loss_of
from tests.support.ranks import run_ranks

FIELDS: dict[str, Any] = {"num_shared_experts": 1, "aux_loss_coeff": 0.0}


def batch(rank: int) -> torch.Tensor:
    return torch.randn(12, D, generator=torch.Generator().manual_seed(100 + rank))


def expected_gradients(ranks: int, **fields: Any) -> dict[str, torch.Tensor]:
    """Of the mean over ranks of each rank's loss."""
    layer = make_layer(**FIELDS, **fields)
    for rank in range(ranks):
        (loss_of(layer(batch(rank))) / ranks).backward()
    return {name: parameter.grad for name, parameter in layer.named_parameters()}


def close_to(layer: nn.Module, expected: dict[str, torch.Tensor], scale: float = 1.0) -> None:
    for name, parameter in layer.named_parameters():
        grad = parameter.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        torch.testing.assert_close(grad * scale, expected[name], rtol=2e-5, atol=1e-6)


def under_ddp(rank: int, options: dict[str, Any]) -> None:
    layer = make_layer(seed=rank, **FIELDS)  # DDP sends rank 0's values
    model = DistributedDataParallel(layer, **options)
    for _ in range(2):
        layer.zero_grad()
        out = model(batch(rank))
        assert out.aux.tokens_per_expert_E.sum() == 12 * 2
        loss_of(out).backward()
        expected = expected_gradients(2)
        close_to(layer, expected)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    plain = torch.stack([grad.norm() for grad in expected.values()]).norm()
    torch.testing.assert_close(norm, plain)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"find_unused_parameters": True}, marks=pytest.mark.slow),
        pytest.param({"static_graph": True}, marks=pytest.mark.slow),
    ],
)
def test_ddp_averages_the_gradients(options):
    run_ranks(under_ddp, 2, options)


def under_fsdp(rank: int, whole: bool) -> None:
    layer = make_layer(**FIELDS)
    mesh = init_device_mesh("cpu", (2,))
    if not whole:
        fully_shard(layer.experts, mesh=mesh)
    fully_shard(layer, mesh=mesh)
    for _ in range(2):
        layer.zero_grad()
        loss_of(layer(batch(rank))).backward()
        close_to(layer, expected_gradients(2))


@pytest.mark.parametrize("whole", [True, False])
def test_fully_shard_averages_the_gradients(whole):
    run_ranks(under_fsdp, 2, whole)


def bfloat16_under_fsdp(rank: int, ours: bool) -> None:
    layer = make_layer(**FIELDS).bfloat16()
    if ours:
        apply_fsdp(layer, ParallelDims.build(Topology(dp_shard=2), "cpu"), blocks=[])
    else:
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(layer.router, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    loss_of(layer(batch(rank).bfloat16())).backward()
    assert layer.router.weight.dtype == torch.float32
    assert all(p.grad.full_tensor().isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("ours", [True, False])
def test_a_bfloat16_layer_shards_its_float32_router_by_itself(ours):
    run_ranks(bfloat16_under_fsdp, 2, ours)


# ------------------------------------------------------------------------------------------------
# Copies and construction under expert parallelism.


def spread(rank: int, dispatcher: str = "all_to_all", **fields: Any) -> tuple[MoELayer, Any]:
    if dispatcher == "padded_all_to_all":
        fields["max_tokens_per_call"] = 16
    layer = make_layer(**FIELDS, dispatcher=dispatcher, **fields)
    mesh = init_device_mesh("cpu", (2,))
    apply_expert_parallel(layer, mesh)
    return layer, mesh


def deep_copies(rank: int, dispatcher: str) -> None:
    layer, _ = spread(rank, dispatcher)
    other = copy.deepcopy(layer)
    assert other.dispatcher is not layer.dispatcher
    assert other.dispatcher.group is layer.dispatcher.group
    assert other.router.balance_group is layer.router.balance_group
    outs = []
    for each in (layer, other):
        out = each(batch(rank))
        (loss_of(out) / 2).backward()
        outs.append(out.hidden)
    assert torch.equal(*outs)
    pairs = list(zip(layer.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(_local(a.grad), _local(b.grad)) for a, b in pairs)
    with torch.no_grad():
        for p in other.parameters():
            _local(p).add_(1)
    assert not any(torch.equal(_local(a), _local(b)) for a, b in pairs)
    assert torch.equal(layer(batch(rank)).hidden, outs[0])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    "dispatcher",
    [
        "all_to_all",
        pytest.param("padded_all_to_all", marks=pytest.mark.slow),
        pytest.param("all_gather", marks=pytest.mark.slow),
    ],
)
def test_a_deep_copy_shares_the_groups_and_nothing_else(dispatcher):
    run_ranks(deep_copies, 2, dispatcher)


def pickles(rank: int, folder: str, dispatcher: str) -> None:
    layer, mesh = spread(rank, dispatcher, capacity={"max_tokens_per_rank": 1000})
    expected = layer(batch(rank)).hidden
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    other = torch.load(file, weights_only=False)
    with pytest.raises(RuntimeError, match=r"call parallel.apply_expert_parallel") as error:
        other(batch(rank))
    assert "\n" not in str(error.value)
    apply_expert_parallel(other, mesh)
    assert torch.equal(other(batch(rank)).hidden, expected)
    with pytest.raises(ValueError, match="must be called once"):
        apply_expert_parallel(other, mesh)
    torch.save((layer, expected), Path(folder) / f"layer{rank}.pt")


def unpickles(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    layer, expected = torch.load(Path(folder) / f"layer{rank}.pt", weights_only=False)
    apply_expert_parallel(layer, mesh)
    out = layer(batch(rank))
    assert torch.equal(out.hidden, expected)
    loss_of(out).backward()
    assert layer.experts.w_up.grad.to_local().abs().sum() > 0


@pytest.mark.parametrize(
    "dispatcher",
    [
        "all_to_all",
        pytest.param("padded_all_to_all", marks=pytest.mark.slow),
        pytest.param("all_gather", marks=pytest.mark.slow),
    ],
)
def test_a_pickle_leaves_the_groups_out_and_gets_them_again(dispatcher, tmp_path):
    run_ranks(pickles, 2, str(tmp_path), dispatcher)
    run_ranks(unpickles, 2, str(tmp_path))


def initialize(rank: int, how: str) -> None:
    with torch.device("meta"):
        layer = make_meta_layer()
    dims = ParallelDims.build(Topology(dp_shard=2, ep=1 if how == "fsdp" else 2), "cpu")
    if how != "fsdp":
        apply_expert_parallel(layer, dims.ep_mesh)
    if how != "ep":
        apply_fsdp(layer, dims, blocks=[])
    layer.to_empty(device="cpu")
    torch.manual_seed(3)
    layer.reset_parameters()
    torch.manual_seed(3)
    expected = MoELayer(layer.config).state_dict()
    for name, value in layer.state_dict().items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, expected[name]), name


def make_meta_layer() -> MoELayer:
    return MoELayer(make_layer(num_shared_experts=1, ffn_bias=True, expert_bias=True).config)


@pytest.mark.parametrize("how", ["ep", "fsdp", "both"])
def test_reset_parameters_of_a_sharded_layer_draws_the_values_of_one_process(how):
    run_ranks(initialize, 2, how)


def checkpointed(rank: int, dispatcher: str) -> None:
    layer, _ = spread(rank, dispatcher)
    for bad in (False, True):
        x = batch(rank).requires_grad_()
        if bad and rank == 0:
            x.data[3, 2] = torch.nan
        out = checkpoint(lambda x: x + layer(x).hidden, x, use_reentrant=False)
        out.sum().backward()
        assert x.grad.isfinite().all(dim=1).sum() == len(x) - (bad and rank == 0)


@pytest.mark.parametrize("dispatcher", ["all_gather", "all_to_all", "padded_all_to_all"])
def test_a_token_that_is_not_finite_ends_no_recomputation_before_a_collective(dispatcher):
    run_ranks(checkpointed, 2, dispatcher)


def compiled(rank: int) -> None:
    layer, _ = spread(rank)
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    # torch's own: its tracer looks at .grad of the exchange's result.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model = torch.compile(layer, backend=count)
    for length in (7, 12, 30, 5):
        x = batch(rank)[:length]
        expected, actual = layer(x), model(x)
        torch.testing.assert_close(actual.hidden, expected.hidden, rtol=1e-5, atol=1e-6)
        assert actual.aux.stopwatch is not None
    assert len(graphs) <= 4  # before and after the exchange; for the first length, and for any
    loss_of(actual).backward()
    assert layer.experts.w_up.grad.to_local().abs().sum() > 0


def test_under_expert_parallelism_a_compiled_layer_leaves_the_exchange_in_eager_mode():
    run_ranks(compiled, 2)


# ------------------------------------------------------------------------------------------------
# The wrong order.


def wrong_orders(rank: int) -> None:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")

    def refused(message: str, function: Any, *args: Any, **kwargs: Any) -> None:
        with pytest.raises(ValueError, match=message) as error:
            function(*args, **kwargs)
        assert "\n" not in str(error.value)

    layer, mesh = spread(rank)
    refused("apply_expert_parallel must be called once", apply_expert_parallel, layer, mesh)
    apply_fsdp(layer, dims, blocks=[])
    before = "must be called before apply_fsdp"
    refused(before, apply_expert_parallel, layer, mesh)
    refused("apply_fsdp must be called once", apply_fsdp, layer, dims, blocks=[])
    refused(before, apply_recompute, [layer], "full")

    layer = make_layer()
    fully_shard(layer, mesh=mesh)
    refused(before, apply_expert_parallel, layer, mesh)

    refused("Linear must have layers with experts", apply_expert_parallel, nn.Linear(4, 4), mesh)
    apply_expert_parallel(nn.Linear(4, 4), mesh, allow_no_experts=True)  # as a stage may be
    model = nn.Sequential(make_layer(), make_layer(num_experts=3))
    refused(r"num_experts \(3\) must be a multiple", apply_expert_parallel, model, mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters()), "no layer was changed"

    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    apply_recompute([model[0]], "full")
    refused("must be called once", apply_recompute, [model[0]], "selective")
    plan = {"0": "columns"}
    apply_tensor_parallel(model, mesh, plan)
    refused("must be called once", apply_tensor_parallel, model, mesh, plan)
    dist.barrier()


def test_the_wrong_order_and_twice_are_refused_in_one_line():
    run_ranks(wrong_orders, 2)


def test_a_pickled_router_without_groups_has_none():
    router = make_layer().router
    assert pickle.loads(pickle.dumps(router)).balance_group is None
