"""Floating-point operations per token: against publications, and against what torch counts."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe import MoEConfig
from pretrain.model import peak_rate
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder
from pretrain.model.flops import forward_flops
from pretrain.model.peak_rate import peak_flops_per_second

DEEPSEEK_V3 = (
    ModelConfig(
        vocab_size=129280, num_layers=61, d_model=7168, num_heads=128, num_kv_heads=128,
        d_ff=18432, first_k_dense=3, qk_norm="none", kv_lora_rank=512, q_lora_rank=1536,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    ),
    MoEConfig(d_model=7168, d_ff=2048, num_experts=256, top_k=8, num_shared_experts=1),
)  # fmt: skip
QWEN3_30B_A3B = (
    ModelConfig(
        vocab_size=151936, num_layers=48, d_model=2048, num_heads=32, num_kv_heads=4, head_dim=128
    ),
    MoEConfig(d_model=2048, d_ff=768, num_experts=128, top_k=8),
)


def test_deepseek_v3_is_as_published():
    # arXiv 2505.09343: 250.4 and 281.2 GFLOP per token at 4096, with and without the causal mask.
    # The diagonal, which an exact count has, is 0.008 of the first.
    assert forward_flops(*DEEPSEEK_V3, 4096).training / 1e9 == pytest.approx(250.457, abs=5e-4)
    assert forward_flops(*DEEPSEEK_V3, 4096, causal=False).training / 1e9 == pytest.approx(
        281.152, abs=5e-4
    )


def test_qwen3_30b_a3b_is_as_published():
    # NeMo Automodel: 277 TFLOP/s at 12,040 tokens/s and 4096 tokens, causal; torchtitan#4441:
    # 37.6 GFLOP per token at 8192, not causal.
    assert forward_flops(*QWEN3_30B_A3B, 4096).training == pytest.approx(277e12 / 12040, rel=4e-3)
    full = forward_flops(*QWEN3_30B_A3B, 8192, causal=False)
    assert full.training / 1e9 == pytest.approx(37.577, abs=5e-4)


@pytest.mark.parametrize(("layers", "h", "heads"), [(40, 6144, 48), (80, 12288, 96)])
def test_gpt_18b_and_145b_are_as_published(layers, h, heads):
    # arXiv 2104.04473, eq. 3, without the recomputed forward: 96 becomes 72. Its feed-forward layer
    # has two matrices of 4h; three of 8h/3 are as many weights.
    V, s = 51200, 2048
    model = ModelConfig(
        vocab_size=V, num_layers=layers, d_model=h, num_heads=heads, num_kv_heads=heads,
        d_ff=8 * h // 3,
    )  # fmt: skip
    published = 72 * layers * h**2 * (1 + s / (6 * h) + V / (12 * layers * h))
    counted = forward_flops(model, None, s, causal=False).training
    assert counted == pytest.approx(published, rel=1e-12)


SMALL = {"vocab_size": 300, "d_model": 32, "num_layers": 3, "num_heads": 4}
MOE = MoEConfig(d_model=32, d_ff=24, num_experts=6, top_k=2, num_shared_experts=1,
                shared_expert_gate=True, backend="loop")  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "moe"),
    [
        ({"num_kv_heads": 2, "d_ff": 40}, None),
        ({"num_kv_heads": 2, "d_ff": 40, "first_k_dense": 1}, MOE),
        ({"num_kv_heads": 4, "head_dim": 12}, MOE.model_copy(update={"activation": "gelu"})),
        ({"num_kv_heads": 2, "d_ff": 40, "num_mtp_layers": 1}, None),
        ({"num_kv_heads": 2, "d_ff": 40, "first_k_dense": 1, "num_mtp_layers": 2}, MOE),
        (
            {"num_kv_heads": 4, "qk_norm": "none", "kv_lora_rank": 16, "q_lora_rank": 20,
             "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10},
            MOE,
        ),
        (
            {"num_kv_heads": 4, "qk_norm": "none", "kv_lora_rank": 16, "qk_nope_head_dim": 6,
             "qk_rope_head_dim": 4, "v_head_dim": 10},
            MOE,
        ),
    ],
)  # fmt: skip
def test_torch_counts_the_same(fields, moe):
    B, S = 2, 16
    model = ModelConfig(**SMALL, **fields)
    decoder = Decoder(model, moe)
    counter = FlopCounterMode(display=False)
    # Plain products, all of which torch knows; it counts masked pairs as well.
    with counter, sdpa_kernel(SDPBackend.MATH):
        depth = model.num_mtp_layers
        decoder(torch.randint(300, ((1 + depth) * B, S)), depth=depth)
    counted = forward_flops(model, moe, S, causal=False)
    assert counter.get_total_flops() == B * S * counted.total


def test_causal_attention_counts_the_pairs_of_the_mask():
    S = 7
    mask = torch.ones(S, S).tril()
    full = forward_flops(*QWEN3_30B_A3B, S, causal=False).attention_scores
    causal = forward_flops(*QWEN3_30B_A3B, S).attention_scores
    assert causal / full == pytest.approx(float(mask.mean()))


def test_a_devices_peak_is_above_what_a_product_reaches():
    peak = peak_flops_per_second(torch.device("cpu"), torch.float32)
    assert 1e8 < peak < 1e14


@pytest.mark.parametrize(("at_once", "largest"), [(0.001, 1024), (0.05, 128), (0.006, 256)])
def test_no_product_larger_than_it_takes_is_measured(monkeypatch, at_once, largest):
    measured = []

    def seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
        measured.append(size)
        return at_once * size / 64

    monkeypatch.setattr(peak_rate, "_product_seconds", seconds)
    peak = peak_flops_per_second(torch.device("cpu"), torch.float16)
    assert measured[-1] == largest
    assert peak == 2 * largest**3 / (at_once * largest / 64)
