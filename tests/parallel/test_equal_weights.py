"""Ranks whose initial weights differ are refused when FSDP is applied, and only they."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe import MoEConfig, MoELayer
from parallel import (
    ParallelDims,
    Topology,
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_parallel,
)
from tests.support.ranks import run_ranks


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = MoELayer(MoEConfig(d_model=8, d_ff=8, num_experts=4, top_k=2))
        self.head = nn.Linear(8, 32)


def apply(topology: Topology, change: str | None = None, at: tuple[int, ...] = ()) -> str:
    """Parallelize a model; ranks ``at`` have another value in the parameter ``change``."""
    dims = ParallelDims.build(topology, "cpu")
    torch.manual_seed(0)
    model = Model()
    if dist.get_rank() in at:
        with torch.no_grad():
            model.get_parameter(change).flatten()[-1] += 1
    apply_expert_parallel(model, dims.ep_mesh)
    apply_tensor_parallel(model, dims.tp_mesh, {})
    try:
        apply_fsdp(model, dims, blocks=[])
    except ValueError as error:
        return str(error)
    return ""


def on_two_ranks(rank: int) -> dict[str, str]:
    both, experts = "head.weight", "moe.experts.w_gate"
    replicas, shards = Topology(dp_replicate=2), Topology(dp_shard=2)
    spread, over_tp = Topology(dp_shard=2, ep=2), Topology(tp=2, ep=2)
    return {
        "equal replicas": apply(replicas),
        "replicas": apply(replicas, both, (1,)),
        "experts of replicas": apply(replicas, experts, (1,)),
        "shards": apply(shards, both, (0,)),
        "experts of shards": apply(shards, experts, (1,)),
        # Each rank keeps only its own experts: the last value of rank 0 is given away.
        "experts of other ranks": apply(spread, experts, (0,)),
        "a router over tp": apply(over_tp, "moe.router.weight", (1,)),
    }


def test_other_weights_on_some_ranks_are_refused_in_one_line():
    a, b = run_ranks(on_two_ranks, 2)
    assert a == b, "every rank ends"
    for case, name in [
        ("replicas", "head.weight"),
        ("experts of replicas", "moe.experts.w_gate"),
        ("shards", "head.weight"),
        ("experts of shards", "moe.experts.w_gate"),
        ("a router over tp", "moe.router.weight"),
    ]:
        assert a[case].startswith(f"parameter {name} must have equal initial values on ranks 0-1:")
        assert "torch.manual_seed" in a[case]
        assert "\n" not in a[case]
    assert a["equal replicas"] == a["experts of other ranks"] == ""


def seeds_of_their_own(rank: int) -> str:
    dims = ParallelDims.build(Topology(dp_replicate=2), "cpu")
    torch.manual_seed(rank)
    with pytest.raises(ValueError, match="must have equal initial values") as caught:
        apply_fsdp(Model(), dims, blocks=[])
    return str(caught.value)


def without_values(rank: int) -> None:
    dims = ParallelDims.build(Topology(dp_replicate=2), "cpu")
    torch.manual_seed(rank)
    for device in ("meta", "meta" if rank else "cpu"):  # all ranks, and all but the first
        with torch.device(device):
            model = Model()
        apply_fsdp(model, dims, blocks=[])


def test_seeds_that_differ_are_found_and_the_meta_device_is_left_alone():
    run_ranks(seeds_of_their_own, 2)
    run_ranks(without_values, 2)
