"""Adapters in the decoder under tensor, expert and context parallelism and FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import moe
from moe import MoEConfig
from parallel import (
    ParallelDims,
    Topology,
    apply_context_parallel,
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_parallel,
    local_sequence,
)
from pretrain.model import Decoder, ModelConfig
from pretrain.parallelize.decoder import tensor_parallel_plan
from tests.moe.adapters.models import randomized
from tests.support.ranks import run_ranks

SIZES = {"vocab_size": 300, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
         "d_ff": 48, "first_k_dense": 1}  # fmt: skip
LATENT = {"num_kv_heads": 4, "qk_norm": "none", "kv_lora_rank": 16, "q_lora_rank": 12,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}  # fmt: skip


def make_decoder(kind: str) -> Decoder:
    config = ModelConfig(**SIZES | (LATENT if kind == "latent" else {"head_dim": 8}))
    experts = MoEConfig(d_model=32, d_ff=16, num_experts=4, top_k=2, num_shared_experts=1,
                        aux_loss_coeff=0.0)  # fmt: skip
    torch.manual_seed(0)
    decoder = Decoder(config, experts)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(std=0.1)
    on = ("experts", "router", "attention", "dense")
    return randomized(moe.add_lora(decoder, rank=3, alpha=6, on=on))


def ids() -> Tensor:
    return torch.randint(300, (2, 8), generator=torch.Generator().manual_seed(3))


def gradients(decoder: Decoder, tokens_BS: Tensor, weight_BSV: Tensor) -> dict[str, Any]:
    logits = decoder(tokens_BS).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    (logits * weight_BSV).sum().backward()
    return {n: p.grad for n, p in decoder.named_parameters() if p.requires_grad}


def weights() -> Tensor:
    return torch.randn(2, 8, 300, generator=torch.Generator().manual_seed(4))


def on_rank(rank: int, kind: str, degrees: dict[str, int]) -> dict[str, Tensor]:
    decoder = make_decoder(kind)
    dims = ParallelDims.build(Topology(**degrees), "cpu")
    apply_expert_parallel(decoder, dims.ep_mesh)
    apply_tensor_parallel(decoder, dims.tp_mesh, tensor_parallel_plan(decoder))
    apply_context_parallel(decoder, dims.cp_mesh, dims.token_mesh)
    apply_fsdp(decoder, dims, blocks=list(decoder.blocks.values()))
    tokens, weight = ids(), weights()
    if dims.topology.cp > 1:
        tokens, weight = (local_sequence(x, dims.cp_mesh) for x in (tokens, weight))
    if dims.topology.dp_shard > 1:
        tokens, weight = (x.chunk(2)[rank * 2 // dims.topology.world] for x in (tokens, weight))
    assert all(p.grad is None for p in decoder.parameters())
    got = gradients(decoder, tokens, weight)
    return {name: grad.full_tensor() for name, grad in got.items()}


@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("grouped", {"tp": 2, "ep": 2}),
        pytest.param("latent", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("grouped", {"cp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("latent", {"dp_shard": 2, "tp": 2, "ep": 4}, marks=pytest.mark.slow),
    ],
)
def test_gradients_of_adapters_are_those_of_one_process(kind, degrees):
    decoder = make_decoder(kind)
    expected = gradients(decoder, ids(), weights())
    assert all(grad is not None and grad.any() for grad in expected.values())
    world = degrees.get("tp", 1) * degrees.get("dp_shard", 1) * degrees.get("cp", 1)
    for got in run_ranks(on_rank, world, kind, degrees):
        assert got.keys() == expected.keys()
        for name, grad in expected.items():
            assert (got[name] - grad).norm() <= 1e-4 * grad.norm(), name
