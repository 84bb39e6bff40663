"""Tiny random models of every MoE family of transformers that ``moe.adopt`` takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

VOCAB = 120
# By the names that any family has for a size; a config takes those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40, "shared_intermediate_size": 40,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 3, "num_experts_per_token": 3, "moe_topk": 3, "moe_k": 3,
    "n_shared_experts": 2, "num_shared_experts": 2, "moe_num_shared_experts": 2,
    "n_group": 4, "num_expert_group": 4, "topk_group": 2, "norm_topk_prob": True,
    "routed_scaling_factor": 1.7, "route_scale": 1.7, "router_scaling_factor": 1.7,
    "moe_routed_scaling_factor": 1.7, "moe_router_scaling_factor": 1.7, "swiglu_limit": 0.5,
    "first_k_dense_replace": 1, "num_dense_layers": 1,
    "max_position_embeddings": 128, "kv_lora_rank": 16, "q_lora_rank": 20, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 16,
    "sliding_window": 16, "attention_dropout": 0.0,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8,
}  # fmt: skip

# What a family's model has besides, by the family's name; `config` and `model` are classes where
# the library's mappings do not have them.
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}


def _text(name: str, **sizes: Any) -> dict[str, Any]:
    """The language model of a model of several kinds of input."""
    return {"config": f"{name}Config", "model": f"{name}Model", "sizes": sizes}


MORE: dict[str, dict[str, Any]] = {
    "Qwen3-Next": {"sizes": _LINEAR},
    "Qwen3.5-MoE": {"config": "Qwen3_5MoeTextConfig", "sizes": _LINEAR},
    "Qwen4-Exp": {"config": "Qwen4ExpTextConfig", "sizes": {
        **_LINEAR, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 16, "indexer_compress_ratio": 4,
    }},
    "Qwen3-VL-MoE": _text("Qwen3VLMoeText"),
    "Qwen3-Omni-MoE thinker": {
        "config": "Qwen3OmniMoeTextConfig", "model": "Qwen3OmniMoeThinkerTextModel",
    },
    "Qwen3-Omni-MoE talker": {
        "config": "Qwen3OmniMoeTalkerTextConfig", "model": "Qwen3OmniMoeTalkerModel",
        "sizes": {"shared_expert_intermediate_size": 40},
    },
    "GLM-4V-MoE": _text("Glm4vMoeText", rope_parameters={
        "rope_type": "default", "rope_theta": 700.0, "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 1.0,
    }),
    "GLM-5-Next": _text(
        "Glm5NextText", qk_rope_head_dim=0, linear_head_dim=8, linear_num_heads=4, **_SPARSE
    ),
    "MiniMax-M3-VL": {"config": "MiniMaxM3VLTextConfig", "model": "MiniMaxM3VLForCausalLM"},
    "Kimi-Linear": {"sizes": {**_LINEAR, "linear_head_dim": 8, "linear_num_heads": 4}},
    "dots3-note text": {"config": "Dots3NoteTextConfig", "model": "Dots3NoteForCausalLM"},
    "DeepSeek-V2": {"sizes": {"topk_method": "group_limited_greedy"}},
    "DeepSeek-V4": {"sizes": {"mlp_layer_types": ["hash_moe", "moe"], "o_lora_rank": 8,
                              "o_groups": 2, "hc_mult": 2}},
    "DeepSeek-OCR-2": _text("DeepseekOcr2Text", **_SPARSE),
    "Unlimited-OCR": _text("UnlimitedOcrText", **_SPARSE),
    "Granite-MoE-Hybrid": {"sizes": _LINEAR},
    "Jamba": {"sizes": {"attn_layer_period": 2, "attn_layer_offset": 1}},
    "OpenAI privacy filter": {"model": "OpenAIPrivacyFilterForTokenClassification"},
    "Llama 4": {"config": "Llama4TextConfig"},
    "Nemotron-H": {"sizes": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2,
        "moe_shared_expert_intermediate_size": 40,
    }},
    "LFM2-MoE": {"sizes": {"layer_types": ["conv", "full_attention"]}},
    "DBRX": {"sizes": {
        "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3,
                       "moe_jitter_eps": None, "hidden_size": 32},
    }},
    "Mistral 4": {"model": "Mistral4ForCausalLM", "sizes": {"rope_parameters": {
        "rope_type": "default", "rope_theta": 700.0, "partial_rotary_factor": 1.0,
        "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64,
    }}},
    "Mistral Large 4": _text("MistralLarge4Text"),
    "Bailing-Hybrid": {"sizes": {**_LINEAR, **_SPARSE}},
    "A.X K2": {"sizes": {"n_group": None, "topk_group": None}},
    "Aria": {"config": "AriaTextConfig"},
    "Beam": {"sizes": _SPARSE},
    "Flint": {"sizes": {"mlp_only_layers": [0]}},
    "Step-3.7": _text("Step3p7Text", pad_token_id=0, **_SPARSE),
}  # fmt: skip


def config_of(family: Any, **changes: Any) -> Any:
    """A small config of a family."""
    more = MORE.get(family.name, {})
    known = (
        getattr(transformers, more["config"])
        if "config" in more
        else CONFIG_MAPPING[family.model_type]
    )
    default = known()
    names = set(default.to_dict()) | set(getattr(known, "attribute_map", {}))
    sizes = {name: value for name, value in SIZES.items() if name in names}
    if "kv_lora_rank" in names:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return known(**sizes | more.get("sizes", {}) | changes)


def make_model(family: Any, **changes: Any) -> PreTrainedModel:
    """Random everywhere, in norms and biases too, and large enough to make a difference."""
    config, more = config_of(family, **changes), MORE.get(family.name, {})
    if "model" in more:
        build = getattr(transformers, more["model"])
    else:
        build = transformers.AutoModelForCausalLM.from_config
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build(config).parameters())
    assert size < 1_000_000, f"{family.name} has {size} parameters: give its config smaller sizes"
    torch.manual_seed(0)
    model = build(config)
    generator = torch.Generator().manual_seed(sum(map(ord, family.name)))
    with torch.no_grad():
        for name, tensor in model.eval().state_dict().items():
            if not tensor.is_floating_point():
                if name.endswith("tid2eid"):
                    order = torch.rand(len(tensor), 8, generator=generator).argsort(-1)
                    tensor.copy_(order[:, : tensor.shape[1]])
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim <= 1:
                tensor.copy_(0.3 * noise + (not name.endswith("bias")))
            else:
                tensor.copy_(noise * (1.0 if "embed" in name else tensor.shape[-1] ** -0.5))
    return model


def inputs_of(model: PreTrainedModel) -> dict[str, Any]:
    """Two texts of 12 tokens, with labels where the model has a loss of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (2, 12), generator=generator)
    if type(model).__name__ == "Qwen3OmniMoeTalkerModel":  # of a thinker's hidden states
        return {"inputs_embeds": torch.randn(2, 12, 32, generator=generator), "use_cache": False}
    inputs = {"input_ids": ids, "use_cache": False}
    if "labels" in inspect.signature(model.forward).parameters:
        inputs["labels"] = (
            ids % getattr(model.config, "num_labels", VOCAB)
            if ("TokenClassification" in type(model).__name__)
            else ids
        )
    return inputs
