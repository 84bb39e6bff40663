"""Ranks and experts that get no tokens.

One rank's experts are chosen by nobody, or a token's expert is elsewhere: the rank must still take
its part in every exchange, and what it did not compute must be 0.

Legend: T tokens, D d_model, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe import MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel, local_shard
from tests.museum.cases import Edit, case
from tests.museum.shared_routing import layer_of, tokens
from tests.support.ranks import run_ranks

OF_RANK_0 = torch.tensor([20.0, 20.0, 0.0, 0.0])


def _layer(liked_E: Tensor, **fields: Any) -> MoELayer:
    """A layer whose router adds a bias to the logits of four experts.

    Weights are not scaled to a sum of 1: what is added to all of them would not be seen.
    """
    layer = layer_of(router_bias=True, norm_topk_prob=False, aux_loss_coeff=0.0, **fields)
    layer.router.bias.data.copy_(liked_E)
    return layer


def _gradients(layer: MoELayer, x_TD: Tensor) -> dict[str, Tensor]:
    hidden = layer(x_TD).hidden
    hidden.square().sum().backward()
    found = {name: local_shard(p.grad) for name, p in layer.named_parameters()}
    return {**found, "hidden": hidden.detach()}


def _on_rank(liked_E: Tensor, rank: int) -> dict[str, Tensor]:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    layer = _layer(liked_E)
    apply_expert_parallel(layer, dims.ep_mesh)
    found = _gradients(layer, tokens().chunk(2)[rank])
    for name in ("router.weight", "router.bias"):
        dist.all_reduce(found[name])
    return found


class _OnRanks:
    """:func:`_on_rank` with some biases, for another process."""

    def __init__(self, liked_E: Tensor) -> None:
        self.liked = liked_E.tolist()

    def __call__(self, rank: int) -> dict[str, Tensor]:
        return _on_rank(torch.tensor(self.liked), rank)


def _check(ranks: list[dict[str, Tensor]], wanted: dict[str, Tensor]) -> None:
    for name, value in wanted.items():
        whole_name = name == "hidden" or name.startswith("experts.")
        got = torch.cat([rank[name] for rank in ranks]) if whole_name else ranks[0][name]
        torch.testing.assert_close(got, value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


@case(
    "NVIDIA-NeMo/Automodel#935",
    "Training hung where one expert-parallel rank had no expert that a token chose.",
    Edit(
        "moe/experts/grouped.py",
        "        weights = self.local_weights()._replace(**adapters)\n",
        "        if not len(source_R):\n            return x_SD.new_zeros(x_SD.shape)\n"
        "        weights = self.local_weights()._replace(**adapters)\n",
    ),
)
def test_a_rank_without_tokens_takes_part():
    """With all tokens on one rank's experts two ranks have one process's outputs and gradients."""
    wanted = _gradients(_layer(OF_RANK_0), tokens())
    ranks = run_ranks(_OnRanks(OF_RANK_0), 2)
    assert ranks[1]["experts.w_up"].abs().max() == 0
    _check(ranks, wanted)


@case(
    "huggingface/kernels-community#1056",
    "Router weights of other ranks' experts got gradients from memory that no kernel had written.",
    Edit(
        "moe/rows.py",
        "grads[0].new_zeros(ctx.shape).index_copy_(0, index_R, grads[0])",
        "grads[0].new_ones(ctx.shape).index_copy_(0, index_R, grads[0])",
    ),
)
def test_weights_of_other_ranks_experts_get_no_gradient_here():
    """Two ranks with a token's experts on both give the router one process's gradient."""
    everywhere_E = torch.zeros(4)
    wanted = _gradients(_layer(everywhere_E), tokens())
    _check(run_ranks(_OnRanks(everywhere_E), 2), wanted)


@case(
    "pytorch/torchtitan#1166",
    "A grouped product with an expert of no tokens never returned from the backward.",
    Edit(
        "moe/experts/packed.py",
        "self.whole.of(expert).map(Tensor.zero_)",
        "self.whole.of(expert).map(lambda grad: grad.fill_(torch.nan))",
    ),
)
def test_an_expert_without_tokens_has_a_gradient_of_zero():
    """With every backend an expert that no token chose has zeros, and others their gradients."""
    for backend in ("packed", "loop", "grouped_mm"):
        found = _gradients(_layer(OF_RANK_0, backend=backend), tokens())
        for matrix in ("w_gate", "w_up", "w_down"):
            norms_E = found[f"experts.{matrix}"].flatten(1).norm(dim=1)
            assert (norms_E[:2] > 0).all()
            assert (norms_E[2:] == 0).all(), (backend, matrix, norms_E)
