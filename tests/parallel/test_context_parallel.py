"""Sequences spread over real ranks against whole ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe import MoEConfig
from parallel import (
    ParallelDims,
    Topology,
    apply_context_parallel,
    apply_expert_parallel,
    full_sequences,
    local_sequence,
)
from parallel.apply.context_parallel import ShardedSequence
from parallel.comm import host_buffers
from pretrain.model.attention import build_attention
from pretrain.model.config import AttentionConfig, ModelConfig
from pretrain.model.decoder import Decoder
from pretrain.parallelize.micro_batches import LocalBatch, forward_backward
from tests.support.ranks import run_ranks

B, W, D = 2, 24, 32
CONFIGS = {
    "grouped": AttentionConfig(d_model=D, num_heads=4, num_kv_heads=2),
    "all heads": AttentionConfig(d_model=D, num_heads=4, num_kv_heads=4, qk_norm="all_heads"),
    "latent": AttentionConfig(
        d_model=D, num_heads=4, num_kv_heads=4, qk_norm="none", kv_lora_rank=16, q_lora_rank=20,
        qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10,
    ),
}  # fmt: skip


def attention_pass(config: AttentionConfig, batch: int, mesh: Any) -> dict[str, torch.Tensor]:
    """Output and gradients; with a mesh, of this rank's part."""
    torch.manual_seed(1)
    module = build_attention(config)
    x, grad = torch.randn(2, batch, W, D)
    if mesh is not None:
        apply_context_parallel(module, mesh)
        x, grad = local_sequence(x, mesh), local_sequence(grad, mesh)
    x = x.clone().requires_grad_()
    y = module(x)
    y.backward(grad)
    grads = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **grads}


def attention_on_rank(rank: int, world: int) -> dict[Any, dict[str, torch.Tensor]]:
    mesh = ParallelDims.build(Topology(cp=world), "cpu").cp_mesh
    where = local_sequence(torch.arange(W).unsqueeze(0), mesh)[0]
    return {
        (name, batch): attention_pass(config, batch, mesh) | {"where": where}
        for name, config in CONFIGS.items()
        for batch in (B, 0)
    }


@pytest.mark.parametrize("world", [2, 4])
def test_attention_over_ranks_is_that_of_whole_sequences(world):
    results = run_ranks(attention_on_rank, world, world)
    for (name, batch), first in results[0].items():
        expected = attention_pass(CONFIGS[name], batch, None)
        for key, value in expected.items():
            if key in ("x", "y"):
                actual = torch.empty_like(value)
                for result in results:
                    actual[:, result[name, batch]["where"]] = result[name, batch][key]
            else:
                actual = sum(result[name, batch][key] for result in results)
            error = (actual - value).norm()
            assert error <= 1e-5 * value.norm() + 1e-9, f"{name}, batch {batch}: {key}"
        assert len(first["where"]) == W // world


def work_on_rank(rank: int, world: int) -> tuple[list[int], int]:
    dims = ParallelDims.build(Topology(cp=world), "cpu")
    where = ShardedSequence(dims.cp_mesh.get_group()).positions(W // world, torch.device("cpu"))
    return where.tolist(), int((where + 1).sum())


def test_every_token_is_somewhere_once_and_the_work_is_even():
    results = run_ranks(work_on_rank, 4, 4)
    assert sorted(p for where, _ in results for p in where) == list(range(W))
    # Pairs of a query and a key that it sees.
    assert len({pairs for _, pairs in results}) == 1


MODEL = ModelConfig(vocab_size=300, d_model=D, num_layers=3, num_heads=4, num_kv_heads=2,
                    d_ff=40, first_k_dense=1)  # fmt: skip
BALANCE = {"aux_loss_coeff": 0.3, "seq_aux_loss_coeff": 0.4, "z_loss_coeff": 0.1}
MOES = [
    {"num_shared_experts": 1},
    {"aux_loss_scope": "global_batch"},
    {"score_func": "sigmoid", "expert_bias": True, "n_groups": 2},
]


def step(fields: dict[str, Any], dims: ParallelDims | None) -> dict[str, torch.Tensor]:
    """Two micro-batches' loss and gradients."""
    torch.manual_seed(2)
    moe = MoEConfig(d_model=D, d_ff=24, num_experts=8, top_k=3, **BALANCE, **fields)
    model = Decoder(MODEL, moe)
    with torch.no_grad():
        for layer in model.blocks.values():
            if layer.moe is not None:
                layer.moe.router.weight.mul_(20)
    if dims is not None:
        apply_expert_parallel(model, dims.ep_mesh)
        apply_context_parallel(model, dims.cp_mesh)
        for layer in model.blocks.values():
            if layer.moe is not None:
                layer.moe.router.balance_group = dist.group.WORLD
    batches = torch.randint(1, 300, (2, B, W + 1), generator=torch.Generator().manual_seed(5))
    batches[1, :, 1::3] = ~batches[1, :, 1::3]  # inputs and no targets
    # Padding that leaves a rank's part of the last sequence without a token, and one with few.
    batches[1, 0, W // 2 :] = -1
    batches[1, -1, 2:] = -1
    result = forward_backward(
        model, list(batches), 2 * B * W, device=torch.device("cpu"),
        local_batch=LocalBatch(dims, masked_targets=True),
    )  # fmt: skip
    assert result.routing is not None
    routing = torch.cat((result.routing.aux_loss_sum_LA, result.routing.tokens_L.unsqueeze(1)), 1)
    if dims is not None:
        dist.all_reduce(routing)
    grads = {}
    for name, p in model.named_parameters():
        grads[name] = p.grad
        if dims is not None and "moe.experts" in name:
            grads[name] = p.grad.full_tensor()
        elif dims is not None:
            dist.all_reduce(grads[name])
    with torch.no_grad(), full_sequences(model):
        # Any length, and all of it here.
        logits = model(batches[0][:1, :7]).logits
    tokens = torch.tensor(result.target_tokens)
    return grads | {
        "loss": result.loss_sum, "tokens": tokens, "whole": logits, "routing": routing
    }  # fmt: skip


def step_on_rank(rank: int, world: int, ep: int) -> list[dict[str, torch.Tensor]]:
    host_buffers.LEAST_BYTES = 1  # as if the tensors were large
    dims = ParallelDims.build(Topology(cp=world, ep=ep), "cpu")
    return [step(fields, dims) for fields in MOES]


@pytest.mark.parametrize(("world", "ep"), [(2, 2), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_losses_and_gradients_of_a_model_are_those_of_one_process(world, ep):
    results = run_ranks(step_on_rank, world, world, ep)
    for number, fields in enumerate(MOES):
        expected = step(fields, None)
        for key, value in expected.items():
            ranks = [result[number][key] for result in results]
            actual = sum(ranks) if key in ("loss", "tokens") else ranks[-1]
            error = (actual - value).double().norm()
            assert error <= 1e-5 * value.double().norm(), f"{fields}: {key}"
