"""A deep copy of a parallelized model computes with its own weights, and shares process groups."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from moe import MoEConfig
from parallel import (
    ExactSums,
    ParallelDims,
    Topology,
    apply_activation_offload,
    apply_context_parallel,
    apply_delayed_weight_grad,
    apply_expert_parallel,
    apply_recompute,
    apply_tensor_parallel,
    local_sequence,
    local_shard,
)
from parallel.apply.document_mask import Documents
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder
from pretrain.parallelize.decoder import tensor_parallel_plan
from tests.support.ranks import run_ranks

MODEL = ModelConfig(
    vocab_size=258, d_model=32, num_layers=2, num_heads=4, num_kv_heads=4, d_ff=40, first_k_dense=1,
    qk_norm="none", kv_lora_rank=16, q_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=10,
)  # fmt: skip
MOE = MoEConfig(d_model=32, d_ff=24, num_experts=4, top_k=2, num_shared_experts=1,
                aux_loss_coeff=0.1, seq_aux_loss_coeff=0.1)  # fmt: skip
B, W = 2, 16
Apply = Callable[[Decoder, ParallelDims], None]


def blocks(model: Decoder) -> list[nn.Module]:
    return list(model.blocks.values())


APPLY: dict[str, Apply] = {
    "delayed weight gradients": lambda model, dims: apply_delayed_weight_grad(model),
    "expert parallelism": lambda model, dims: apply_expert_parallel(model, dims.ep_mesh),
    "tensor parallelism": lambda model, dims: apply_tensor_parallel(
        model, dims.tp_mesh, tensor_parallel_plan(model)
    ),
    "context parallelism": lambda model, dims: apply_context_parallel(
        model, dims.cp_mesh, dims.token_mesh
    ),
    "full recomputation": lambda model, dims: apply_recompute(blocks(model)[:1], "full"),
    "selective recomputation": lambda model, dims: apply_recompute(blocks(model)[1:], "selective"),
    "activation offload": lambda model, dims: apply_activation_offload(blocks(model)),
}
"""In the order in which a model is parallelized."""
CASES: list[tuple[Topology, list[str]]] = [
    (Topology(tp=2), ["tensor parallelism"]),
    (Topology(tp=2, ep=2), list(APPLY)),
    (Topology(cp=2), ["context parallelism"]),
    (Topology(cp=2, ep=2), list(APPLY)),
    (Topology(dp_shard=2, ep=2), ["expert parallelism"]),
    (Topology(dp_shard=2), ["delayed weight gradients"]),
    (Topology(dp_shard=2), ["full recomputation", "selective recomputation"]),
    (Topology(dp_shard=2), ["activation offload"]),
]


def make_model(names: list[str], dims: ParallelDims) -> Decoder:
    torch.manual_seed(3)
    model = Decoder(MODEL, MOE)
    for name in names:
        APPLY[name](model, dims)
    return model


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            local_shard(parameter).mul_(1.5)


def forward_backward(model: Decoder, dims: ParallelDims) -> list[Tensor]:
    """Logits, and gradients, which are taken from the model."""
    generator = torch.Generator().manual_seed(5)
    tokens_BW = torch.randint(1, MODEL.vocab_size, (B, W), generator=generator)
    tokens_BW[:, 5] = 0
    out = model(local_sequence(tokens_BW, dims.cp_mesh), None, Documents.ended_by(0, tokens_BW))
    logits = local_shard(out.logits)
    (logits.square().mean() + sum(aux.aux_loss for aux in out.aux)).backward()
    gradients = [local_shard(p.grad) for p in model.parameters()]
    model.zero_grad()
    return [logits.detach(), *gradients]


def check_copies() -> None:
    for topology, names in CASES:
        dims = ParallelDims.build(topology, "cpu")
        model, rebuilt = make_model(names, dims), make_model(names, dims)
        change(rebuilt)
        expected, before = forward_backward(rebuilt, dims), forward_backward(model, dims)
        copied = copy.deepcopy(model)
        change(copied)
        assert same(forward_backward(copied, dims), expected), (topology, names)
        assert all(p.grad is None for p in model.parameters()), (topology, names)
        assert same(forward_backward(model, dims), before), (topology, names)


def same(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, tensors, others))


def check_plain_norm() -> None:
    """A norm of PyTorch's class, which has no ``normalize`` of its own."""
    mesh = ParallelDims.build(Topology(tp=2), "cpu").tp_mesh
    model = apply_tensor_parallel(nn.Sequential(nn.RMSNorm(8)), mesh, {"0": "norm"})
    copied, x = copy.deepcopy(model), torch.randn(2, 3, 8)
    change(copied)
    assert torch.allclose(copied(x), 1.5 * model(x))


def check_exact_sums() -> None:
    dims = ParallelDims.build(Topology(dp_shard=2, ep=2), "cpu")
    model = make_model(["expert parallelism"], dims)
    ExactSums(4).use_experts(model, lambda _: False)
    copied = copy.deepcopy(model)
    copied(torch.ones(B, W, dtype=torch.int64)).logits.sum().backward()
    ours, theirs = ([b.moe.experts for b in blocks(m) if b.moe] for m in (model, copied))
    assert all(experts.unit_sums.take() is None for experts in ours)
    assert all(experts.unit_sums.experts is experts for experts in theirs)
    assert all(experts.unit_sums.take() is not None for experts in theirs)


def on_rank(rank: int) -> None:
    check_plain_norm()
    check_exact_sums()
    check_copies()


def test_a_deep_copy_computes_with_its_own_weights():
    run_ranks(on_rank, 2)
