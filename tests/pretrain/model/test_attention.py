"""Attention kinds, against transformers' modules and against themselves."""

from __future__ import annotations

import pytest
import torch
from transformers import DeepseekV3Config, Qwen3MoeConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen

from parallel import Topology
from pretrain.errors import InputError
from pretrain.model.attention import GroupedQueryAttention, LatentAttention
from pretrain.model.config import AttentionConfig, YarnConfig
from pretrain.model.rotary import rope_frequencies, rotate, turns
from pretrain.parallelize.micro_batches import forward_backward
from pretrain.spec.read import load_spec
from tests.pretrain.model.test_parts import batches, build, parity_on_rank
from tests.support.jobs import make_spec, write_spec
from tests.support.ranks import run_ranks

LATENT = {
    "num_kv_heads": 4, "qk_norm": "none", "kv_lora_rank": 12, "q_lora_rank": 10,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 10, "rope_interleaved": True,
}  # fmt: skip
YARN = {
    "factor": 8.0, "original_seq_len": 48, "beta_fast": 16.0, "beta_slow": 1.0,
    "mscale": 0.8, "mscale_all_dim": 0.5,
}  # fmt: skip
CPU = torch.device("cpu")


def theirs_latent(rope: dict, q_lora_rank: int | None, interleave: bool):
    config = DeepseekV3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=12,
        q_lora_rank=q_lora_rank, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=10,
        rope_parameters=rope, rope_interleave=interleave, max_position_embeddings=384,
        attn_implementation="eager", rms_norm_eps=1e-3,
    )  # fmt: skip
    return config, deepseek.DeepseekV3Attention(config, 0), deepseek.DeepseekV3RotaryEmbedding


def run_theirs(config, module, rotary, x_BSD):
    S = x_BSD.shape[1]
    positions = rotary(config)(x_BSD, torch.arange(S).unsqueeze(0))
    mask = torch.full((S, S), -torch.inf).triu(1)[None, None]
    return module(x_BSD, position_embeddings=positions, attention_mask=mask)[0]


def give(module: torch.nn.Module, names: dict[str, torch.Tensor]) -> None:
    """Random values, the same in both; norms too, so that a swapped one shows."""
    for name, theirs in names.items():
        with torch.no_grad():
            theirs.copy_(torch.randn_like(theirs) * (0.3 if theirs.ndim > 1 else 1.0))
            module.get_parameter(name).copy_(theirs)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("q_lora_rank", [10, None])
@pytest.mark.parametrize("yarn", [YARN, {**YARN, "mscale": 0.0, "mscale_all_dim": 0.0}, None])
def test_latent_attention_is_that_of_transformers(yarn, q_lora_rank, interleaved):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    if yarn is not None:
        names = {"original_seq_len": "original_max_position_embeddings"}
        rope |= {names.get(k, k): v for k, v in yarn.items() if v} | {"rope_type": "yarn"}
    config, theirs, rotary = theirs_latent(rope, q_lora_rank, interleaved)
    ours = LatentAttention(
        AttentionConfig(
            d_model=32, num_heads=4, rope_theta=500.0, norm_eps=1e-3,
            yarn=YarnConfig(**yarn) if yarn else None,
            **{**LATENT, "q_lora_rank": q_lora_rank or 0, "rope_interleaved": interleaved},
        )
    )  # fmt: skip
    pairs = {
        "wkv_a": theirs.kv_a_proj_with_mqa, "kv_a_norm": theirs.kv_a_layernorm,
        "wkv_b": theirs.kv_b_proj, "wo": theirs.o_proj,
    }  # fmt: skip
    if q_lora_rank:
        pairs |= {"wq_a": theirs.q_a_proj, "q_a_norm": theirs.q_a_layernorm}
        pairs |= {"wq_b": theirs.q_b_proj}
    else:
        pairs |= {"wq": theirs.q_proj}
    give(ours, {f"{name}.weight": module.weight for name, module in pairs.items()})
    assert len(pairs) == len(list(ours.parameters()))
    x = torch.randn(2, 60, 32)
    torch.testing.assert_close(ours(x), run_theirs(config, theirs, rotary, x), rtol=1e-5, atol=1e-5)


def test_heads_of_any_size_and_their_norms_are_those_of_transformers():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=32, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
        attn_implementation="eager", rms_norm_eps=1e-3,
        rope_parameters={"rope_type": "yarn", "rope_theta": 900.0, "factor": 4.0,
                         "original_max_position_embeddings": 20},
        max_position_embeddings=80,
    )  # fmt: skip
    theirs = qwen.Qwen3MoeAttention(config, 0)
    ours = GroupedQueryAttention(
        AttentionConfig(
            d_model=32, num_heads=6, num_kv_heads=2, head_dim=10, rope_theta=900.0, norm_eps=1e-3,
            yarn=YarnConfig(factor=4.0, original_seq_len=20),
        )
    )  # fmt: skip
    pairs = {
        "wq": theirs.q_proj, "wk": theirs.k_proj, "wv": theirs.v_proj, "wo": theirs.o_proj,
        "q_norm": theirs.q_norm, "k_norm": theirs.k_norm,
    }  # fmt: skip
    give(ours, {f"{name}.weight": module.weight for name, module in pairs.items()})
    x = torch.randn(2, 50, 32)
    expected = run_theirs(config, theirs, qwen.Qwen3MoeRotaryEmbedding, x)
    torch.testing.assert_close(ours(x), expected, rtol=1e-5, atol=1e-5)


def test_pairs_side_by_side_are_the_same_rotation_of_other_dims():
    x = torch.randn(1, 1, 9, 8)
    by = turns(rope_frequencies(8, 100.0, None, CPU), torch.arange(9))
    apart = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    assert torch.equal(rotate(x, by, True), rotate(apart, by))
    assert not torch.equal(rotate(x, by, True), rotate(x, by))


def test_yarn_keeps_fast_pairs_and_slows_slow_ones():
    plain = rope_frequencies(64, 10000.0, None, CPU)
    yarn = YarnConfig(factor=40.0, original_seq_len=4096)
    stretched = rope_frequencies(64, 10000.0, yarn, CPU)
    assert torch.equal(stretched[:10], plain[:10])
    torch.testing.assert_close(stretched[-8:], plain[-8:] / 40)
    assert ((stretched < plain) & (stretched > plain / 40))[10:24].any()
    real = YarnConfig(factor=40.0, original_seq_len=4096, mscale=1.0, mscale_all_dim=1.0)
    assert real.rotary_scale == 1.0, "DeepSeek-V3's own"
    assert real.logit_scale == pytest.approx(1.368888**2, rel=1e-4)


def test_a_tied_latent_model_on_ranks_is_the_model_in_one_process(tmp_path):
    model = {**LATENT, "tie_embeddings": True, "yarn": {**YARN, "original_seq_len": 8}}
    moe = {"score_func": "sigmoid", "expert_bias": True, "num_shared_experts": 1}
    spec = make_spec(tmp_path, model=model, moe=moe)
    alone_model, _ = build(spec, Topology(), 0)
    alone = forward_backward(alone_model, batches(spec, 3), 1000, device=CPU)
    topology = Topology(dp_shard=4, ep=2)
    results = run_ranks(parity_on_rank, 4, spec, topology, 3)
    assert sum(r[0] for r in results) == pytest.approx(float(alone.loss_sum), rel=1e-5)
    values, grads = results[0][3]
    assert "head.weight" not in values
    for name, parameter in alone_model.named_parameters():
        assert torch.equal(values[name], parameter.detach()), f"{name} began with other values"
        error = (grads[name] - parameter.grad).norm() / parameter.grad.norm()
        assert error < 1e-5, f"{name}: {error}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 7}, "model.head_dim (7) must be even"),
        ({"qk_rope_head_dim": 3}, "model.qk_rope_head_dim (3) must be even and at most the size"),
        ({"qk_rope_head_dim": 34}, "must be even and at most the size of a head (8): rotary"),
        ({**LATENT, "attention_bias": "qkv"}, "model.attention_bias (qkv) must be none with model"),
        ({"v_head_dim": 8}, "model.v_head_dim (8) must be 0 where model.kv_lora_rank is 0"),
        ({"yarn": YARN}, "model.yarn.mscale (0.8) must be 0 where model.kv_lora_rank is 0"),
        ({"yarn": {**YARN, "mscale": 0.0}}, "model.yarn.mscale (0.0) and model.yarn.mscale_all_di"),
        ({"yarn": {"factor": 2.0, "original_seq_len": 8, "beta_fast": 1.0}},
         "model.yarn.beta_fast (1.0) must be above model.yarn.beta_slow (1.0)"),
        ({**LATENT, "v_head_dim": 0}, "model.v_head_dim (0) must be at least 1 with model.kv_lora"),
        ({**LATENT, "qk_rope_head_dim": 7}, "model.qk_rope_head_dim (7) must be even"),
        ({**LATENT, "num_kv_heads": 2}, "model.num_kv_heads (2) must be model.num_heads (4) with"),
        ({**LATENT, "head_dim": 8}, "model.head_dim (8) must be left out with model.kv_lora_rank"),
        ({**LATENT, "qk_norm": "head"}, "model.qk_norm (head) must be none with model.kv_lora"),
        ({"max_seq_len": 31}, "data.seq_len (32) must be at most model.max_seq_len (31)"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(tmp_path, changes, message):
    with pytest.raises(InputError) as error:
        load_spec(write_spec(tmp_path, model=changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
