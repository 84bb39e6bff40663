"""How many floating-point operations a token costs, and how many a device can do.

Legend: B batch, S sequence, D d_model, F d_ff, E experts, K top_k, V vocab.

Counted are the model's products, two operations for a multiplication and its addition, forward once
and backward twice, and nothing else: not what a layout or recomputation does again, not norms,
activations, rotations or look-ups. Of attention only pairs that the causal mask lets through count,
and of experts only those that a token takes. Sequences count as whole ones whether or not
``data.document_mask`` keeps their documents apart; where it does, fewer pairs are computed than are
counted, and what is said of model FLOPs is an upper estimate.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, fields

import torch

from moe import ACTIVATIONS, MoEConfig
from pretrain.model.attention import AttentionConfig
from pretrain.model.decoder import ModelConfig

_TFLOPS = {
    # Dense, without sparsity, of the data sheets; float32 on its own units, without TF32.
    "H200": {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0},
    "H100": {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0},
    "H800": {torch.bfloat16: 989.0, torch.float16: 989.0, torch.float32: 67.0},
    "B200": {torch.bfloat16: 2250.0, torch.float16: 2250.0, torch.float32: 75.0},
    "A100": {torch.bfloat16: 312.0, torch.float16: 312.0, torch.float32: 19.5},
}

_LONG_ENOUGH = 0.02
"""Seconds of a product; larger ones are slow on CPUs without float16, and say no more."""


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one token's forward, a mean over the sequence's positions."""

    attention_projections: float
    attention_scores: float
    """Queries by keys, and the weights by values."""
    dense_layers: float
    routers: float
    experts: float
    """Those that a token takes, shared ones too."""
    head: float

    @property
    def total(self) -> float:
        """The sum."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def training(self) -> float:
        """Forward and backward: every product has two gradients."""
        return 3 * self.total


def forward_flops(
    model: ModelConfig, moe: MoEConfig | None, seq_len: int, causal: bool = True
) -> ForwardFlops:
    """Count a token of a sequence of ``seq_len``.

    ``causal = False`` counts all S keys for each query and not (S + 1) / 2; some publications do.
    """
    num_dense = model.num_layers if moe is None else model.first_k_dense
    num_moe = model.num_layers - num_dense
    keys = (seq_len + 1) / 2 if causal else seq_len
    value = model.v_head_dim if model.latent else model.qk_head_dim
    scores = 2 * model.num_heads * (model.qk_head_dim + value) * keys
    return ForwardFlops(
        attention_projections=2 * model.num_layers * _attention_weights(model),
        attention_scores=model.num_layers * scores,
        dense_layers=2 * num_dense * 3 * model.d_model * model.d_ff,
        routers=0 if moe is None else 2 * num_moe * model.d_model * moe.num_experts,
        experts=0 if moe is None else 2 * num_moe * _expert_weights(moe),
        head=2 * model.d_model * model.vocab_size,
    )


def _attention_weights(c: AttentionConfig) -> int:
    """Of the matrices of one layer."""
    D, H = c.d_model, c.num_heads
    if not c.latent:
        return D * c.qk_head_dim * (2 * H + 2 * c.num_kv_heads)
    queries = H * c.qk_head_dim
    q = c.q_lora_rank * (D + queries) if c.q_lora_rank else D * queries
    kv = D * (c.kv_lora_rank + c.qk_rope_head_dim)
    kv += c.kv_lora_rank * H * (c.qk_nope_head_dim + c.v_head_dim)
    return q + kv + H * c.v_head_dim * D


def _expert_weights(c: MoEConfig) -> int:
    """Of the matrices of one layer that a token passes through."""
    products = 3 if ACTIVATIONS[c.activation].gated else 2
    weights = (c.top_k + c.num_shared_experts) * products * c.d_model * c.d_ff
    return weights + (c.d_model if c.shared_expert_gate else 0)


def peak_flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """What one rank's device can do: of its data sheet, or, where there is none, the fastest of
    some products here and now, with this process's threads."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, by_dtype in _TFLOPS.items():
            if known in name and dtype in by_dtype:
                return by_dtype[dtype] * 1e12
    size, largest = 128, 1024 if device.type == "cpu" else 8192
    while (seconds := _product_seconds(size, device, dtype)) < _LONG_ENOUGH and size < largest:
        size *= 2
    return 2 * size**3 / seconds


def _product_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Not random: a resume has its random state by now.
    a = torch.ones(size, size, device=device, dtype=dtype)
    out, best = torch.empty_like(a), float("inf")
    for _ in range(8):
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return best
