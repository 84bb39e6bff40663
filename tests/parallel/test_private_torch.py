"""The private names of PyTorch that Convoy uses: each is there, and does what Convoy needs.

A red test here comes with a new version of torch. Its docstring says what breaks without the name.
"""

from __future__ import annotations

import json
import os
import pydoc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import parallel
from parallel import ParallelDims, Topology, apply_fsdp
from pretrain.parallelize.pipeline import FSDP_ACTIONS
from tests.support.ranks import COLLECTIVE_TIMEOUT, run_ranks


def meshes_on_rank(rank: int) -> tuple[list[int], list[int]]:
    root = init_device_mesh("cpu", (2,), mesh_dim_names=("world",))
    mesh = root._unflatten(0, (2, 1), ("outer", "inner"))
    return mesh["outer"].mesh.tolist(), mesh["inner"].mesh.tolist()


def test_device_mesh_unflatten_makes_sub_meshes_of_one_root():
    """Without DeviceMesh._unflatten, ParallelDims.build has no meshes that FSDP can compose."""
    assert run_ranks(meshes_on_rank, 2) == [([0, 1], [0]), ([0, 1], [1])]


def time_outs_on_rank(rank: int) -> set[float]:
    dims = ParallelDims.build(Topology(pp=2, dp_shard=2, ep=2), "cpu")
    meshes = [value for value in vars(dims).values() if isinstance(value, DeviceMesh)]
    groups = [mesh.get_group() for mesh in meshes]
    assert len(groups) == 10
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    return {backend.options._timeout.total_seconds() for backend in backends}


def test_the_groups_of_meshes_have_the_time_out_of_the_default_group():
    """Without backend_override a stuck rank of a sub-group is noticed after half an hour."""
    assert run_ranks(time_outs_on_rank, 4) == [{COLLECTIVE_TIMEOUT.total_seconds()}] * 4


def late_gradient_on_rank(rank: int) -> tuple[bool, list[float]]:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    apply_fsdp(model, ParallelDims.build(Topology(dp_shard=2), "cpu"), blocks=[])
    finish = fully_shard.state(model)._root_post_backward_final_callback
    model(torch.ones(1, 2)).sum().backward()
    before = model[0].weight.grad.to_local().flatten().tolist()
    model[0].weight.grad = None
    model.unshard()
    torch.autograd.backward(model[0].weight, torch.full((2, 2), 3.0))
    finish()
    return before == [2.0, 2.0], model[0].weight.grad.to_local().flatten().tolist()


def test_fsdp_reduces_a_gradient_that_came_after_the_backward():
    """Without _root_post_backward_final_callback, parallel.finish_backward cannot reduce delayed
    weight gradients: the schedules zbv and dualpipev break."""
    assert run_ranks(late_gradient_on_rank, 2) == [(True, [6.0, 6.0])] * 2


def test_fsdp_reduces_by_the_function_that_tests_count():
    """Without foreach_reduce, test_layouts cannot count FSDP's reductions; no product code uses
    the name."""
    assert callable(_fsdp_param_group.foreach_reduce)


def test_pipeline_actions_are_known_or_left_to_fsdp():
    """Without _Action, _ComputationType and _add_send_recv there is no order of a pipeline step."""
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv, _ComputationType

    names = {kind.name for kind in _ComputationType}
    run = {"FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT"}
    run |= {"SEND_F", "RECV_F", "SEND_B", "RECV_B"}
    # make_orders takes OVERLAP_F_B apart.
    assert run | FSDP_ACTIONS | {"OVERLAP_F_B"} >= names
    assert run <= names
    forward = _ComputationType.FORWARD
    orders = {0: [_Action(0, forward, 0)], 1: [_Action(1, forward, 0)]}
    found = _add_send_recv(orders, lambda stage: stage, 2)
    assert [str(action) for action in found[0]] == ["0F0", "0SEND_F0"]
    assert [str(action) for action in found[1]] == ["1RECV_F0", "1F0"]


def store_on_rank(rank: int) -> int:
    store = distributed_c10d._get_default_store().clone()
    dist.barrier()
    return store.add("guard", 1)


def test_the_default_store_opens_a_second_connection():
    """Without _get_default_store, a hang report has no store to ask other ranks through."""
    assert sorted(run_ranks(store_on_rank, 2)) == [1, 2]


def flight_recorder_on_rank(rank: int) -> tuple[list[int], dict]:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(3))
    from torch._C._distributed_c10d import _dump_fr_trace_json

    groups = {
        group.group_name: ranks for group, ranks in distributed_c10d._world.pg_group_ranks.items()
    }
    entry: dict = {}
    while not entry.get("retired"):  # PyTorch notes the end a moment after the wait
        entry = json.loads(_dump_fr_trace_json())["entries"][-1]
    return list(groups[entry["process_group"][0]]), entry


def test_the_flight_recorder_has_what_dumps_need():
    """Without _dump_fr_trace_json and _world.pg_group_ranks, or their fields, no rank writes its
    last collectives, and convoy inspect flight has nothing to read."""
    (ranks, entry), _ = run_ranks(flight_recorder_on_rank, 2, group=False)
    assert ranks == [0, 1]
    known = {"collective_seq_id": 1, "profiling_name": "gloo:all_reduce", "input_sizes": [[3]],
             "input_dtypes": ["Float"], "is_p2p": False, "retired": True}  # fmt: skip
    assert {name: entry[name] for name in known} == known
    assert {"state", "time_created_ns"} <= set(entry)


@pytest.mark.parametrize("name", ["HashStore", "PrefixStore", "Store"])
def test_stores_are_public_names(name):
    """torch.distributed exports the stores, though type checkers do not see that."""
    assert getattr(dist, name).__name__ == name


@pytest.mark.parametrize(
    "op",
    [
        "_grouped_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ],
)  # fmt: skip
def test_selective_recomputation_knows_the_operators_that_it_saves(op):
    """Without the operator, parallel.recompute fails at import; another name for it would recompute
    attention or experts in the backward."""
    assert getattr(torch.ops.aten, op).default is not None


def test_a_dispatch_mode_passes_operations_to_another():
    """Without TorchDispatchMode, or its hook for an operation, selective recomputation cannot keep
    FSDP's own operations from PyTorch's count of a block's operations."""
    counted = []

    class Counts(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted.append(func)
            return func(*args, **kwargs or {})

    assert TorchDispatchMode.supports_higher_order_operators is False
    assert TorchDispatchMode.ignore_compile_internals() is False
    x = torch.ones(2, 2)
    saving, reusing = create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    with Counts():
        product = saving.__torch_dispatch__(torch.ops.aten.mm.default, (), (x, x), {})
        again = reusing.__torch_dispatch__(torch.ops.aten.mm.default, (), (x, x), {})
    assert counted.count(torch.ops.aten.mm.default) == 1
    assert torch.equal(product, again)


def test_foreach_functions_take_lists_of_gradients():
    """Without _foreach_norm and _foreach_mul_, gradients have no norm and no clipping."""
    x = [torch.full((4,), 2.0), torch.full((1,), 3.0)]
    assert [float(norm) for norm in torch._foreach_norm(x)] == [4.0, 3.0]
    torch._foreach_mul_(x, 2.0)
    assert x[0].tolist() == [4.0] * 4


def test_help_shows_the_public_names():
    names = dir(parallel)
    assert len(names) <= 40
    page = pydoc.plain(pydoc.render_doc(parallel))
    assert [name for name in names if name not in page] == []


def test_the_transforms_of_torch_func_can_be_listed():
    """Without get_interpreter_stack a layer under vmap gives PyTorch's error, about .item()."""
    functorch = torch._C._functorch
    found = []

    def look(x: torch.Tensor) -> torch.Tensor:
        found.append([each.key() for each in functorch.get_interpreter_stack()])
        return x.sum()

    torch.vmap(torch.func.grad(look))(torch.ones(2, 3))
    kinds = functorch.TransformType
    assert found == [[kinds.Vmap, kinds.Grad]]
    assert not functorch.get_interpreter_stack()


def test_named_tuples_can_be_registered_for_export():
    """Without _register_namedtuple, torch.export.save refuses a layer's output."""
    from torch.utils._pytree import SUPPORTED_SERIALIZED_TYPES

    from moe import MoEAux, MoEOutput

    assert {MoEAux, MoEOutput} <= set(SUPPORTED_SERIALIZED_TYPES)
