"""Wrong numbers under expert, tensor and data parallelism.

Every rank printed a plausible number, and the number was wrong.

Legend: T tokens, D d_model.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe import MoEConfig, MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel, clip_grad_norm
from tests.museum.cases import Edit, case
from tests.support.ranks import run_ranks

CONFIG = MoEConfig(d_model=16, d_ff=24, num_experts=4, top_k=2)


def _layer_with_gradients(x_TD: torch.Tensor) -> MoELayer:
    torch.manual_seed(0)
    layer = MoELayer(CONFIG)
    layer(x_TD).hidden.square().sum().backward()
    return layer


def _clip_on_rank(rank: int) -> float:
    torch.manual_seed(0)
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = MoELayer(CONFIG)
    apply_expert_parallel(layer, dims.ep_mesh)
    x_TD = torch.randn(64, 16, generator=torch.Generator().manual_seed(1)).chunk(2)[rank]
    layer(x_TD).hidden.square().sum().backward()
    for parameter in layer.router.parameters():
        dist.all_reduce(parameter.grad)
    return clip_grad_norm(layer, dims, 1.0)


@case(
    "deepspeedai/DeepSpeed#8475",
    "The norm that clips gradients left out the experts of other expert-parallel ranks, so that "
    "ranks clipped by different factors and their copies of dense weights drifted apart.",
    Edit("parallel/comm/gradients.py", "all_reduce(square).wait()", "pass"),
)
def test_every_rank_clips_by_the_norm_of_all_experts():
    """Two ranks that share the experts report one gradient norm, and one process reports it too."""
    x_TD = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    wanted = clip_grad_norm(_layer_with_gradients(x_TD), None, 1.0)
    norms = run_ranks(_clip_on_rank, 2)
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(wanted, rel=1e-5)


@case(
    "NVIDIA-NeMo/Automodel#1408",
    "The auxiliary loss was added to a tensor that carried no gradient, so that the router was "
    "never balanced.",
    Edit(
        "router/losses.py",
        "torch.dot(f_E, mean_over_tokens(probs_TE, token_mask_T))",
        "torch.dot(f_E, mean_over_tokens(probs_TE.detach(), token_mask_T))",
    ),
)
def test_the_balancing_loss_reaches_the_router():
    """The gradient of the balancing loss reaches the router's weights."""
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=16, d_ff=24, num_experts=4, top_k=2, aux_loss_coeff=0.1))
    layer(torch.randn(64, 16)).aux.load_balance_loss.backward()
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.abs().max() > 0
