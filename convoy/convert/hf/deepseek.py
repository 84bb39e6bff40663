"""The configs of DeepSeek-V2, DeepSeek-V3 and dots.llm1, which share their words."""

from __future__ import annotations

from typing import Any

from convoy.convert.hf.model_config import HFConfig, head_dim, read_decoder
from moe import MoEConfig
from pretrain.errors import InputError
from pretrain.model import ModelConfig

_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def read_deepseek_v3(config: HFConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections of a DeepSeek-V3 config."""
    config.must("scoring_func", "sigmoid")
    config = config.with_defaults({"norm_topk_prob": True})
    more = {
        "rope_interleaved": config.flag("rope_interleave", True),
        "num_mtp_layers": config.size("num_nextn_predict_layers", 0),
    }
    return _read_latent(config) | more, _read_sigmoid(config)


def read_deepseek_v2(config: HFConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections of a DeepSeek-V2 config: a group's score is that of its best expert, and weights
    are not normalized (arXiv 2405.04434, section 2.2.2)."""
    config.must("scoring_func", "softmax")
    config.must("norm_topk_prob", False)
    config.must("topk_method", "greedy", "group_limited_greedy")
    limited = config.values.get("topk_method") == "group_limited_greedy"
    balance = config.number("aux_loss_alpha", 0.001)
    by_sequence = config.flag("seq_aux", True)
    return _read_latent(config) | {"rope_interleaved": True}, {
        **_read_experts(config),
        "norm_topk_prob": False,
        "route_scale": config.number("routed_scaling_factor", 1.0),
        "n_groups": config.size("n_group") if limited else 1,
        "topk_groups": config.size("topk_group") if limited else 1,
        "topk_per_group": 1,
        "aux_loss_coeff": 0.0 if by_sequence else balance,
        "seq_aux_loss_coeff": balance if by_sequence else 0.0,
    }


def read_dots1(config: HFConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sections of a dots.llm1 config: DeepSeek-V3's experts with grouped-query attention."""
    config.must("scoring_func", "sigmoid", "noaux_tc")
    if config.size("max_window_layers", 62) >= config.size("num_hidden_layers"):
        # The window is that of layers from max_window_layers on.
        config = config.without("sliding_window")
    else:
        config = config.with_defaults({"sliding_window": 4096})
    config = config.with_defaults({"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0})
    model = read_decoder(config) | head_dim(config) | {"qk_norm": "head"}
    return model | _read_dense_layers(config), _read_sigmoid(config)


def _read_latent(config: HFConfig) -> dict[str, Any]:
    model = read_decoder(config) | {name: config.size(name) for name in _LATENT_SIZES}
    model |= {"qk_norm": "none", "q_lora_rank": config.size("q_lora_rank", 0)}
    return model | _read_dense_layers(config)


def _read_dense_layers(config: HFConfig) -> dict[str, Any]:
    dense = config.size("first_k_dense_replace", 0)
    size = {"d_ff": config.size("intermediate_size")} if dense else {}
    return {"first_k_dense": dense, **size}


def _read_experts(config: HFConfig) -> dict[str, Any]:
    config.must("moe_layer_freq", 1)
    config.must("router_jitter_noise", 0)
    return {
        "num_experts": config.size("n_routed_experts"),
        "top_k": config.size("num_experts_per_tok"),
        "d_ff": config.size("moe_intermediate_size"),
        "num_shared_experts": config.size("n_shared_experts"),
    }


def _read_sigmoid(config: HFConfig) -> dict[str, Any]:
    config.must("topk_method", "noaux_tc")
    normalized = config.flag("norm_topk_prob")
    if normalized and config.size("num_experts_per_tok") == 1:
        raise config.wrong("num_experts_per_tok", "be at least 2 with norm_topk_prob (true)")
    return {
        **_read_experts(config),
        "score_func": "sigmoid",
        "norm_topk_prob": normalized,
        "route_scale": config.number("routed_scaling_factor"),
        "n_groups": config.size("n_group"),
        "topk_groups": config.size("topk_group"),
        "topk_per_group": 2,
        "expert_bias": True,
        "aux_loss_coeff": 0.0,
        # The paper's (arXiv 2412.19437, section 4.2); a config.json has it not.
        "seq_aux_loss_coeff": 0.0001,
    }


def write_deepseek_v3(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    """The inverse of :func:`read_deepseek_v3`."""
    return {
        **_write_latent(model),
        "rope_interleave": model.rope_interleaved,
        **_write_sigmoid(model, moe, "deepseek_v3"),
    }


def write_deepseek_v2(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    """The inverse of :func:`read_deepseek_v2`."""
    assert moe is not None
    by_sequence = moe.seq_aux_loss_coeff > 0 or moe.aux_loss_coeff == 0
    return {
        **_write_latent(model),
        **_write_experts(model, moe, "deepseek_v2"),
        "scoring_func": "softmax",
        "topk_method": "greedy" if moe.n_groups == 1 else "group_limited_greedy",
        "aux_loss_alpha": moe.seq_aux_loss_coeff if by_sequence else moe.aux_loss_coeff,
        "seq_aux": by_sequence,
    }


def write_dots1(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    """The inverse of :func:`read_dots1`."""
    return {
        "head_dim": model.qk_head_dim,
        "sliding_window": None,
        **_write_sigmoid(model, moe, "dots1"),
    }


def _write_latent(model: ModelConfig) -> dict[str, Any]:
    sizes = {name: getattr(model, name) for name in _LATENT_SIZES}
    return {**sizes, "q_lora_rank": model.q_lora_rank or None}


def _write_sigmoid(model: ModelConfig, moe: MoEConfig | None, kind: str) -> dict[str, Any]:
    assert moe is not None
    if moe.num_experts // moe.n_groups < 2:
        raise InputError(
            f"moe.num_experts ({moe.num_experts}) must be at least 2 for each of moe.n_groups "
            f"({moe.n_groups}) to be a {kind} model"
        )
    experts = _write_experts(model, moe, kind)
    return {**experts, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def _write_experts(model: ModelConfig, moe: MoEConfig, kind: str) -> dict[str, Any]:
    if moe.num_shared_experts == 0:
        raise InputError(f"moe.num_shared_experts (0) must be at least 1 to be a {kind} model")
    return {
        "first_k_dense_replace": model.first_k_dense,
        "intermediate_size": model.d_ff or moe.d_ff,
        "moe_intermediate_size": moe.d_ff,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "n_shared_experts": moe.num_shared_experts,
        "norm_topk_prob": moe.norm_topk_prob,
        "routed_scaling_factor": moe.route_scale,
        "n_group": moe.n_groups,
        "topk_group": moe.topk_groups,
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": model.num_mtp_layers,
    }
