"""The norm of exact gradients: of ranks that hold slices, as of one that holds all."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from moe import MoEConfig, MoELayer
from parallel import ExactSums, ParallelDims, apply_expert_parallel, apply_fsdp, parse_topology
from tests.support.ranks import run_ranks

CONFIG = MoEConfig(d_model=24, d_ff=40, num_experts=4, top_k=2, ffn_bias=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.moe = MoELayer(CONFIG)


def gradient_of(name: str, shape: torch.Size, seed: int, only: str) -> torch.Tensor:
    """Of many sizes, so that the float64 sum of some squares depends on its order."""
    generator = torch.Generator().manual_seed(seed * 1000 + len(name))
    sizes = 2.0 ** torch.randint(-14, 1, shape, generator=generator)
    return torch.randn(shape, generator=generator) * sizes * (only in name)


def norms_on_rank(rank: int, layout: str) -> list[tuple[str, int, float, float]]:
    """Of each kind of parameters and each draw: the squared norm of the slices, and of all."""
    whole, dims = Model(), ParallelDims.build(parse_topology(layout), "cpu")
    model, sums = Model(), ExactSums(1)
    apply_expert_parallel(model, dims.ep_mesh)
    apply_fsdp(model, dims, blocks=[], exact=sums)
    found = []
    for only in ("experts.b_", "experts.w_", "router"):
        for seed in range(8):
            for name, parameter in whole.named_parameters():
                parameter.grad = gradient_of(name, parameter.shape, seed, only)
            for name, parameter in model.named_parameters():
                full = gradient_of(name, parameter.shape, seed, only)
                if isinstance(parameter, DTensor):
                    parameter.grad = distribute_tensor(
                        full, parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
                else:
                    parameter.grad = full.clone()
            squares = sums.square_sum(model, dims), ExactSums(1).square_sum(whole, None)
            found.append((only, seed, *map(float, squares)))
    return found


def test_slices_have_the_norm_of_the_whole() -> None:
    for layout in ("dp_shard=2", "dp_shard=2,ep=2"):
        for only, seed, here, alone in run_ranks(norms_on_rank, 2, layout)[0]:
            assert here == alone != 0, (layout, only, seed)
