"""Every dispatcher against one process, on real ranks: one contract, many implementations."""

from __future__ import annotations

import importlib.util
import resource
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import moe.testing
from moe import MoEConfig, MoELayer
from moe.dispatch import deep_ep
from moe.testing import MAX_TOKENS, D, E, K, make_layer
from parallel import ParallelDims, Topology, apply_expert_parallel
from parallel.comm import collectives, host_buffers
from pretrain.errors import InputError
from pretrain.job import rank_model
from tests.support.jobs import make_spec
from tests.support.ranks import run_ranks


def use_stand_in(also_float32: bool = False) -> None:
    """Have a stand-in of DeepEP in this process."""
    file = Path(__file__).parents[1] / "support" / "stand_ins" / "deep_ep.py"
    spec = importlib.util.spec_from_file_location("deep_ep", file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules["deep_ep"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if also_float32:
        deep_ep.why_no_deep_ep = lambda dtype, device_type: ""


def as_if_large(world: int) -> None:
    """On two ranks tensors take the way of large ones."""
    if world == 2:
        host_buffers.LEAST_BYTES = 1


def with_stand_in(world: int) -> None:
    as_if_large(world)
    use_stand_in(also_float32=True)


class DispatcherContract(moe.testing.DispatcherContract):
    """The shipped contract, with ranks that start quickly."""

    prepare = staticmethod(as_if_large)

    def run_ranks(self, function, world, *arguments):
        return run_ranks(function, world, *arguments)


class TestAllToAll(DispatcherContract):
    fields = {"ffn_bias": True, "shared_expert_gate": True}


class TestAllToAllOnFourRanks(DispatcherContract):
    world = 4


class TestAllToAllInChunks(DispatcherContract):
    fields = {"overlap_chunks": 3}


class TestAllToAllWithDrops(DispatcherContract):
    fields = {"capacity": {"policy": "fixed", "capacity_factor": 0.75, "drop_policy": "probs"}}


class TestAllToAllWithWeightsOnInput(DispatcherContract):
    fields = {"weights_on_input": True, "router_bias": True, "activation": "swiglu_oai",
              "activation_limit": 1.0, "score_func": "sqrtsoftplus"}  # fmt: skip


class TestAllToAllInFloat8(DispatcherContract):
    fields = {"dispatch_dtype": "float8", "overlap_chunks": 2}


class TestHierarchicalInFloat8(DispatcherContract):
    fields = {"dispatcher": "hierarchical", "dispatch_dtype": "float8"}
    world, nodes = 4, 2


class TestFixedSplitInFloat8(DispatcherContract):
    fields = {
        "dispatcher": "padded_all_to_all",
        "max_tokens_per_call": MAX_TOKENS,
        "dispatch_dtype": "float8",
    }


class TestHierarchical(DispatcherContract):
    fields = {"dispatcher": "hierarchical"}
    world, nodes = 4, 2


class TestHierarchicalInChunks(DispatcherContract):
    fields = {
        "dispatcher": "hierarchical",
        "overlap_chunks": 2,
        "capacity": {"policy": "fixed", "capacity_factor": 0.75},
    }
    world, nodes = 4, 2


class TestFixedSplit(DispatcherContract):
    fields = {"dispatcher": "padded_all_to_all", "max_tokens_per_call": MAX_TOKENS}


class TestFixedSplitWithinCapacity(DispatcherContract):
    fields = {
        "dispatcher": "padded_all_to_all",
        "max_tokens_per_call": MAX_TOKENS,
        "capacity": {"policy": "fixed", "capacity_factor": 0.6},
        "overlap_chunks": 2,
    }
    world = 4


class TestFixedSplitGrouped(DispatcherContract):
    fields = {
        "dispatcher": "padded_all_to_all",
        "max_tokens_per_call": MAX_TOKENS,
        "backend": "grouped_mm",
    }


class TestDeepEP(DispatcherContract):
    """Over a stand-in of DeepEP, which needs a GPU."""

    prepare = staticmethod(with_stand_in)
    fields = {"dispatcher": "deep_ep", "max_tokens_per_call": MAX_TOKENS}
    world = 4


class TestDeepEPInFloat8WithDrops(DispatcherContract):
    prepare = staticmethod(with_stand_in)
    fields = {
        "dispatcher": "deep_ep",
        "max_tokens_per_call": MAX_TOKENS,
        "dispatch_dtype": "float8",
        "capacity": {"policy": "fixed", "capacity_factor": 0.75, "drop_policy": "probs"},
    }


class TestAllGather(DispatcherContract):
    fields = {"dispatcher": "all_gather"}
    world = 4


def sizes_on_rank(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Rows and assignments that a rank gets."""
    dims = ParallelDims.build(Topology(dp_shard=world, ep=world), "cpu", ranks_per_node=world // 2)
    sizes = {}
    for name, fields in (
        ("all_to_all", {}),
        ("hierarchical", {"dispatcher": "hierarchical"}),
        ("padded_all_to_all", {"dispatcher": "padded_all_to_all", "max_tokens_per_call": 20,
                               "capacity": {"policy": "fixed", "capacity_factor": 0.5}}),
    ):  # fmt: skip
        layer = make_layer(**fields)
        apply_expert_parallel(layer, dims.ep_mesh, dims.ep_node_meshes)
        x = torch.randn(20, D)
        # Two experts of rank 0, and one of rank 1.
        routed = layer.router(x, None, torch.tensor([[0, 1, 2]]).expand(20, K))
        (arrived,) = layer.dispatcher.dispatch(x, routed)
        layer.dispatcher.combine(arrived.rows.x_SD, arrived)()
        sizes[name] = len(arrived.rows.x_SD), int(arrived.rows.rows_per_expert_E.sum())
    return sizes


def test_a_row_crosses_once_however_many_of_its_experts_are_there():
    world = 4
    sizes = run_ranks(sizes_on_rank, world, world)
    assert [s["all_to_all"] for s in sizes] == [(80, 160), (80, 80), (0, 0), (0, 0)]
    # Rank 0's node gets 20 rows from each rank's peer there, and hands them on within it.
    assert [s["hierarchical"] for s in sizes] == [(80, 160), (80, 80), (0, 0), (0, 0)]
    # ceil(20·3/8·0.5) = 4 of each expert, 2 experts on a rank: 8 slots from each of 4 ranks.
    assert [s["padded_all_to_all"][0] for s in sizes] == [32] * 4


def order_on_rank(rank: int, world: int) -> dict[str, list[str]]:
    """What a layer's forward does, in its order."""
    dims = ParallelDims.build(Topology(dp_shard=world, ep=world), "cpu", ranks_per_node=world // 2)
    events: list[str] = []

    def watch(owner: Any, name: str, event: str) -> None:
        act = getattr(owner, name)
        setattr(owner, name, lambda *args: (events.append(event), act(*args))[1])

    watch(collectives._Exchange, "start", "start")
    watch(collectives.PendingRows, "wait", "wait")
    orders = {}
    for name, fields in (
        ("all_to_all", {}),
        ("hierarchical", {"dispatcher": "hierarchical"}),
        ("padded_all_to_all", {"dispatcher": "padded_all_to_all", "max_tokens_per_call": 5}),
        ("all_gather", {"dispatcher": "all_gather"}),
    ):
        layer = make_layer(**fields)
        apply_expert_parallel(layer, dims.ep_mesh, dims.ep_node_meshes)
        watch(layer, "_shared", "shared")
        watch(layer.experts, "forward", "experts")
        events.clear()
        layer(torch.randn(5, D))
        orders[name] = list(events)
    return orders


def test_shared_experts_are_computed_while_rows_travel():
    for orders in run_ranks(order_on_rank, 4, 4):
        for name, order in orders.items():
            # Rows leave, and weights with the experts' numbers; then the rest of the layer's work.
            starts = 3 if name == "all_gather" else 2
            assert order[: starts + 1] == ["start"] * starts + ["shared"], name
            assert order.index("wait") < order.index("experts"), name
            assert order[order.index("experts") + 1] == "start", name


def deep_ep_on_rank(rank: int, world: int) -> list[torch.Tensor]:
    """The output of two layers of bfloat16, by DeepEP's stand-in and by all-to-all."""
    use_stand_in()
    import deep_ep as stand_in

    dims = ParallelDims.build(Topology(dp_shard=world, ep=world), "cpu")
    found = []
    for fields in ({"dispatcher": "deep_ep", "max_tokens_per_call": 5}, {}):
        layer = make_layer(**fields).bfloat16()
        apply_expert_parallel(layer, dims.ep_mesh)
        x = torch.randn(5, D, generator=torch.Generator().manual_seed(rank)).bfloat16()
        found.append(layer(layer(x).hidden).hidden.detach())
        if fields:
            with pytest.raises(ValueError, match=r"6 tokens: max_tokens_per_call \(5\) must be"):
                layer(x.new_zeros(6, D))
    assert stand_in.ElasticBuffer.built == 1, "layers of equal sizes share DeepEP's memory"
    del stand_in.ElasticBuffer
    deep_ep._buffer.cache_clear()
    layer = make_layer(dispatcher="deep_ep", max_tokens_per_call=5).bfloat16()
    apply_expert_parallel(layer, dims.ep_mesh)
    with pytest.raises(ValueError, match=r"must have DeepEP 2 or later: 2.1.0 has no ElasticBuffe"):
        layer(x)
    return found


def test_deep_ep_has_bfloat16_and_one_memory():
    for ours, plain in run_ranks(deep_ep_on_rank, 2, 2):
        torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)


def without_deep_ep(rank: int) -> None:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = make_layer(dispatcher="deep_ep", max_tokens_per_call=5)
    apply_expert_parallel(layer, dims.ep_mesh)
    with pytest.raises(ValueError, match=r"\(deep_ep\) must have bfloat16 on cuda, not to"):
        layer(torch.zeros(5, D))
    with pytest.raises(ValueError, match=r"\(deep_ep\) needs the package deep_ep, version 2 or"):
        layer.bfloat16()(torch.zeros(5, D).bfloat16())


def test_without_deep_ep_a_layer_says_so():
    run_ranks(without_deep_ep, 2)


def test_a_run_on_a_cpu_refuses_deep_ep(tmp_path):
    moe = {"dispatcher": "deep_ep"}
    spec = make_spec(tmp_path, moe=moe, parallel={"ep": 2}, precision={"compute": "bfloat16"})
    with pytest.raises(InputError, match=r"moe.dispatcher \(deep_ep\) must have bfloat16 on cuda"):
        rank_model._check_device(spec, torch.device("cpu"))


def too_many_tokens(rank: int) -> None:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = make_layer(dispatcher="padded_all_to_all", max_tokens_per_call=4)
    apply_expert_parallel(layer, dims.ep_mesh)
    with pytest.raises(ValueError, match=r"5 tokens: max_tokens_per_call \(4\) must be at least"):
        layer(torch.randn(5, D))
    with pytest.raises(ValueError, match=r"dispatcher \(hierarchical\) must have expert ranks"):
        apply_expert_parallel(make_layer(dispatcher="hierarchical"), dims.ep_mesh)


def test_what_a_dispatcher_cannot_do_is_refused():
    run_ranks(too_many_tokens, 2)
    with pytest.raises(ValueError, match=r"max_tokens_per_call \(0\) must be above 0"):
        make_layer(dispatcher="padded_all_to_all")
    with pytest.raises(ValueError, match=r"max_tokens_per_call \(9\) must be above 0 with"):
        make_layer(max_tokens_per_call=9)
    with pytest.raises(ValueError, match=r"overlap_chunks \(2\) must be 1"):
        make_layer(dispatcher="all_gather", overlap_chunks=2)


def grown(rank: int, fields: dict[str, Any]) -> float:
    """MiB that a rank has grown by in many steps."""
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = MoELayer(MoEConfig(d_model=64, d_ff=8, num_experts=E, top_k=K, **fields))
    apply_expert_parallel(layer, dims.ep_mesh)
    resident = []
    for step in range(50):
        x = torch.randn(4096, 64, requires_grad=True)  # 1 MiB
        layer(x).hidden.sum().backward()
        if step % 10 == 9:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident.append(pages * resource.getpagesize() / 2**20)
    return resident[-1] - resident[0]


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_steps_leave_nothing_in_memory():
    # What leaked once was 4 MiB a step: 160 MiB in the 40 between.
    for fields in ({}, {"overlap_chunks": 2}):
        assert max(run_ranks(grown, 2, fields)) < 40
