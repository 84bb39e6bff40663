"""The families whose checkpoints are converted, each a declaration."""

from __future__ import annotations

from collections.abc import Mapping

from convoy.convert.hf.experts import (
    DenseCount,
    DenseNumbers,
    DenseSpan,
    DenseTypes,
    Groups,
    LimitedGroups,
    SequenceBalance,
    SharedSize,
    Weighting,
)
from convoy.convert.hf.family import Family as Family
from convoy.convert.hf.family import Sections as Sections
from convoy.convert.hf.fields import (
    Always,
    FullLayers,
    HeadDim,
    KeyValueHeads,
    Line,
    Longest,
    Multipliers,
    Must,
    Null,
    Only,
    Same,
    Start,
    Table,
    Window,
    Written,
)
from convoy.convert.hf.model_config import HFConfig
from convoy.convert.hf.others import why_not_converted
from convoy.convert.hf.rope import Rope
from convoy.convert.hf.tensors import In
from moe import MoEConfig
from pretrain.errors import InputError
from pretrain.model import ModelConfig

Lines = tuple[Line, ...]


def _decoder(eps: float = 1e-6, tied: bool = False) -> Lines:
    """What all families have; ``eps`` and ``tied`` where a config.json does not say."""
    return (
        Must("hidden_act", "silu", "swish"),
        Must("attention_dropout", 0.0),
        Null(
            "quantization_config", "be left out: convert the weights to bf16 first", written=False
        ),
        Same("vocab_size", "model.vocab_size"),
        Same("hidden_size", "model.d_model"),
        Same("num_hidden_layers", "model.num_layers"),
        Same("num_attention_heads", "model.num_heads"),
        KeyValueHeads(),
        Longest(),
        Same("rms_norm_eps", "model.norm_eps", "number", default=eps),
        Same("tie_word_embeddings", "model.tie_embeddings", "flag", default=tied),
        # The tokenizer, where it is known, gives the end token.
        Written(use_cache=True, bos_token_id=None, eos_token_id=None, pad_token_id=None),
    )


_GROUPED: Lines = (Only("model.latent", False),)
_NO_BIAS = Must("attention_bias", False)
_BIAS_OF_QKV = Table("attention_bias", "model.attention_bias", ((False, "none"), (True, "qkv")))
_BIAS = Table("attention_bias", "model.attention_bias", ((False, "none"), (True, "all")))

_NORM_OF_HEADS = Always("model.qk_norm", "head")
_NORM_OF_ALL = Always("model.qk_norm", "all_heads")
_NO_NORM = Always("model.qk_norm", "none")
_NORM_AFTER = Always("model.norm_after", True)
_INTERLEAVED = Always("model.rope_interleaved", True)


def _latent(q_lora_rank: int) -> Lines:
    """Multi-head latent attention; ``q_lora_rank`` where a config.json does not say."""
    return (
        Only("model.latent", True),
        _NO_BIAS,
        _NO_NORM,
        Same("kv_lora_rank", "model.kv_lora_rank"),
        Same("q_lora_rank", "model.q_lora_rank", default=q_lora_rank, null=0),
        Same("qk_nope_head_dim", "model.qk_nope_head_dim"),
        Same("qk_rope_head_dim", "model.qk_rope_head_dim"),
        Same("v_head_dim", "model.v_head_dim"),
    )


def _mtp(default: int) -> Line:
    name, also = "num_nextn_predict_layers", ("num_mtp_layers",)
    return Same(name, "model.num_mtp_layers", default=default, also=also)


_BALANCE = Same("router_aux_loss_coef", "moe.aux_loss_coeff", "number", default=0.001)
_D_FF = Same("intermediate_size", "moe.d_ff")
_MOE_D_FF = Same("moe_intermediate_size", "moe.d_ff")
_NO_JITTER = Must("router_jitter_noise", 0, written=False)


def _experts(name: str, *also: str) -> Line:
    return Same(name, "moe.num_experts", also=also)


_BY_SIGMOID: Lines = (
    Always("moe.score_func", "sigmoid"),
    Always("moe.expert_bias", True),
    Start("moe.aux_loss_coeff", 0.0),
    # The paper's (arXiv 2412.19437, section 4.2); a config.json has it not.
    Start("moe.seq_aux_loss_coeff", 0.0001),
)


def _deepseek_experts(
    groups: int | None = None, scale: float | None = None, normalized: bool = True
) -> Lines:
    """DeepSeek-V3's router and shared experts, with what holds where a config.json does not say."""
    return (
        _experts("n_routed_experts"),
        _MOE_D_FF,
        _NO_JITTER,
        Weighting(default=normalized, sigmoid=True),
        Same("n_shared_experts", "moe.num_shared_experts", least=1),
        Same("routed_scaling_factor", "moe.route_scale", "number", default=scale),
        Groups(groups),
        *_BY_SIGMOID,
    )


_OF_DEEPSEEK: Lines = (
    Must("scoring_func", "sigmoid", "noaux_tc"),
    Must("topk_method", "noaux_tc"),
)
_MIXTRAL_NAMES = {
    "moe.router.weight": "block_sparse_moe.gate.weight",
    "moe.router.expert_bias": "block_sparse_moe.e_score_correction_bias",
    "moe.experts.w_gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "moe.experts.w_up": "block_sparse_moe.experts.{expert}.w3.weight",
    "moe.experts.w_down": "block_sparse_moe.experts.{expert}.w2.weight",
}
_NORM_AFTER_NAMES = {
    "attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "post_feedforward_layernorm.weight",
}
_ONE_SHARED_EXPERT = {
    f"moe.shared_experts.w_{role}.weight": f"mlp.shared_expert.{role}_proj.weight"
    for role in ("gate", "up", "down")
}
_GRANITE_NAMES: Mapping[str, str | In] = {
    "moe.router.weight": "block_sparse_moe.router.layer.weight",
    "moe.experts.w_gate": In("block_sparse_moe.input_linear.weight", "expert", 0, 2),
    "moe.experts.w_up": In("block_sparse_moe.input_linear.weight", "expert", 1, 2),
    "moe.experts.w_down": In("block_sparse_moe.output_linear.weight", "expert"),
    "moe.shared_experts.w_gate.weight": In("shared_mlp.input_linear.weight", None, 0, 2),
    "moe.shared_experts.w_up.weight": In("shared_mlp.input_linear.weight", None, 1, 2),
    "moe.shared_experts.w_down.weight": "shared_mlp.output_linear.weight",
}
_ERNIE_NAMES: Mapping[str, str | In] = {
    "moe.router.expert_bias": In("mlp.moe_statics.e_score_correction_bias", "one"),
}
_HUNYUAN_NAMES = {
    "moe.router.weight": "mlp.router.gate.weight",
    "moe.router.expert_bias": "mlp.expert_bias",
    **{
        f"moe.shared_experts.w_{role}.weight": f"mlp.shared_mlp.{role}_proj.weight"
        for role in ("gate", "up", "down")
    },
}
_GRANITE_EXPERTS: Lines = (
    *_decoder(), *_GROUPED, _BIAS, _NO_NORM, HeadDim(own=False), Rope(), Multipliers(),
    _experts("num_local_experts"), _D_FF, _BALANCE, Weighting(None),
)  # fmt: skip

_SPARSE = (
    Family("qwen3_moe", "Qwen3-MoE", "Qwen3MoeForCausalLM", (
        *_decoder(), *_GROUPED, _BIAS, _NORM_OF_HEADS, HeadDim(), Rope(), Window(flag=True),
        DenseNumbers(), _experts("num_experts", "num_local_experts"), _MOE_D_FF, _BALANCE,
        _NO_JITTER, Weighting(),
    )),
    Family("olmoe", "OLMoE", "OlmoeForCausalLM", (
        *_decoder(eps=1e-5), *_GROUPED, _BIAS, _NORM_OF_ALL, HeadDim(own=False), Rope(),
        Null("clip_qkv"), _experts("num_experts", "num_local_experts"), _D_FF, _NO_JITTER,
        Same("router_aux_loss_coef", "moe.aux_loss_coeff", "number", default=0.01), Weighting(),
    )),
    Family("mixtral", "Mixtral", "MixtralForCausalLM", (
        *_decoder(eps=1e-5), *_GROUPED, _NO_BIAS, _NO_NORM, HeadDim(), Rope(1e6), Window(),
        _experts("num_local_experts"), _D_FF, _BALANCE, Weighting(None),
        Same("router_jitter_noise", "moe.input_jitter", "number", default=0.0),
    ), _MIXTRAL_NAMES),
    Family("deepseek_v3", "DeepSeek-V3, Moonlight", "DeepseekV3ForCausalLM", (
        *_decoder(), *_latent(1536), _mtp(1), Rope(), DenseCount(3), *_OF_DEEPSEEK,
        Same("rope_interleave", "model.rope_interleaved", "flag", default=True),
        *_deepseek_experts(),
    )),
    Family("deepseek_v2", "DeepSeek-V2", "DeepseekV2ForCausalLM", (
        *_decoder(), *_latent(1536), _INTERLEAVED, Rope(), DenseCount(),
        _experts("n_routed_experts"), _MOE_D_FF, _NO_JITTER,
        Same("n_shared_experts", "moe.num_shared_experts", least=1),
        Same("num_experts_per_tok", "moe.top_k"), Must("norm_topk_prob", False),
        Always("moe.norm_topk_prob", False), Must("scoring_func", "softmax"), LimitedGroups(),
        Same("routed_scaling_factor", "moe.route_scale", "number", default=1.0), SequenceBalance(),
    )),
    Family("dots1", "dots.llm1", "Dots1ForCausalLM", (
        *_decoder(), *_GROUPED, _BIAS, _NORM_OF_HEADS, HeadDim(), Rope(),
        Window(4096, since=62), DenseCount(), *_OF_DEEPSEEK,
        *_deepseek_experts(1, 1.0, normalized=False),
    )),
    Family("qwen2_moe", "Qwen2-MoE", "Qwen2MoeForCausalLM", (
        *_decoder(), *_GROUPED, _NO_NORM, HeadDim(own=False), Rope(), Window(flag=True),
        Table("qkv_bias", "model.attention_bias", ((True, "qkv"), (False, "none"))),
        DenseNumbers(), _experts("num_experts"), _MOE_D_FF, _BALANCE, Weighting(),
        SharedSize("shared_expert_intermediate_size", "moe_intermediate_size"),
        Always("moe.shared_expert_gate", True),
    ), _ONE_SHARED_EXPERT),
    Family("glm4_moe", "GLM-4.5", "Glm4MoeForCausalLM", (
        *_decoder(eps=1e-5), *_GROUPED, _BIAS_OF_QKV, HeadDim(), Rope(partial=0.5), _mtp(1),
        Table("use_qk_norm", "model.qk_norm", ((False, "none"), (True, "head"))),
        DenseCount(1), *_deepseek_experts(1, 1.0),
    )),
    Family("glm4_moe_lite", "GLM-4.7-Flash", "Glm4MoeLiteForCausalLM", (
        *_decoder(eps=1e-5), *_latent(768), _mtp(0), Rope(), DenseTypes(1),
        Same("rope_interleave", "model.rope_interleaved", "flag", default=True),
        *_deepseek_experts(1, 1.8),
    )),
    Family("solar_open", "Solar Open", "SolarOpenForCausalLM", (
        *_decoder(eps=1e-5), *_GROUPED, _BIAS_OF_QKV, _NO_NORM, HeadDim(default=128),
        Rope(1e6), *_deepseek_experts(1, 1.0),
    )),
    Family("minimax_m2", "MiniMax-M2", "MiniMaxM2ForCausalLM", (
        *_decoder(), *_GROUPED, _NORM_OF_ALL, HeadDim(default=128),
        Rope(5e6, partial=1.0, size="rotary_dim"),
        Must("scoring_func", "sigmoid"), Must("use_qk_norm", True), Must("use_routing_bias", True),
        Must("qk_norm_type", "per_layer", written=False),
        Must("shared_intermediate_size", 0, written=False),
        _experts("num_local_experts"), _D_FF, _NO_JITTER, Weighting(None, sigmoid=True),
        *_BY_SIGMOID,
    ), _MIXTRAL_NAMES),
    Family("hy_v3", "Hunyuan 3", "HYV3ForCausalLM", (
        *_decoder(eps=1e-5), *_GROUPED, _BIAS, Must("mlp_bias", False), _NORM_OF_HEADS,
        HeadDim(default=128), Rope(11_158_840.0), DenseTypes(1),
        _experts("num_experts"), _MOE_D_FF, Weighting(None, sigmoid=True),
        Same("num_shared_experts", "moe.num_shared_experts", least=1),
        Same("router_scaling_factor", "moe.route_scale", "number", default=2.826), *_BY_SIGMOID,
    ), _HUNYUAN_NAMES),
    Family("ernie4_5_moe", "Ernie 4.5", "Ernie4_5_MoeForCausalLM", (
        *_decoder(eps=1e-5, tied=True), *_GROUPED, Must("use_bias", False), _NO_NORM,
        HeadDim(own=False), Rope(500_000.0), _INTERLEAVED, DenseSpan(),
        _experts("moe_num_experts"), _MOE_D_FF, _BALANCE, Weighting(None, count="moe_k"),
        Same("moe_num_shared_experts", "moe.num_shared_experts", default=2),
        Always("moe.expert_bias", True),
    ), _ERNIE_NAMES, ignored=r"model\.mtp_.*"),
    Family("flex_olmo", "FlexOlmo", "FlexOlmoForCausalLM", (
        *_decoder(), *_GROUPED, _BIAS, _NORM_OF_ALL, _NORM_AFTER, HeadDim(own=False),
        Rope(500_000.0), _experts("num_experts"), _D_FF, Weighting(),
        Same("router_aux_loss_coef", "moe.aux_loss_coeff", "number", default=0.01),
    ), _NORM_AFTER_NAMES),
    Family(
        "granitemoe", "Granite 3 MoE", "GraniteMoeForCausalLM", _GRANITE_EXPERTS, _GRANITE_NAMES,
    ),
    Family("granitemoeshared", "Granite MoE with shared experts", "GraniteMoeSharedForCausalLM", (
        *_GRANITE_EXPERTS,
        SharedSize("shared_intermediate_size", "intermediate_size", default=0, least=0),
    ), _GRANITE_NAMES),
    Family("mellum", "Mellum 2", "MellumForCausalLM", (
        *_decoder(), *_GROUPED, _BIAS, _NORM_OF_HEADS, HeadDim(default=128),
        Rope(500_000.0, by_layer_type=True), FullLayers(), DenseTypes(0),
        _experts("num_experts", "num_local_experts"), _MOE_D_FF, _BALANCE, Weighting(default=True),
    ), ignored=r"mtp\..*", only="every layer has full attention"),
)  # fmt: skip


def _dense(*lines: Line, eps: float = 1e-6, tied: bool = False) -> Lines:
    return (*_decoder(eps, tied), *_GROUPED, Same("intermediate_size", "model.d_ff"), *lines)


_NO_MLP_BIAS = Must("mlp_bias", False)
_DENSE = (
    Family("qwen3", "Qwen3", "Qwen3ForCausalLM", _dense(
        _BIAS, _NORM_OF_HEADS, HeadDim(default=128), Rope(), Window(flag=True),
    )),
    Family("mistral", "Mistral", "MistralForCausalLM", _dense(
        _NO_BIAS, _NO_NORM, HeadDim(), Rope(), Window(4096),
    )),
    Family("llama", "Llama", "LlamaForCausalLM", _dense(
        _BIAS, _NO_MLP_BIAS, _NO_NORM, HeadDim(), Rope(),
    )),
    Family("qwen2", "Qwen2", "Qwen2ForCausalLM", _dense(
        Always("model.attention_bias", "qkv"), _NO_NORM, HeadDim(own=False), Rope(),
        Window(flag=True),
    )),
    Family("ernie4_5", "Ernie 4.5, dense", "Ernie4_5ForCausalLM", _dense(
        Must("use_bias", False), _NO_NORM, HeadDim(default=128), Rope(500_000.0), _INTERLEAVED,
        eps=1e-5, tied=True,
    )),
    Family("olmo2", "OLMo 2", "Olmo2ForCausalLM", _dense(
        _BIAS, _NORM_OF_ALL, _NORM_AFTER, HeadDim(own=False), Rope(), eps=1e-5,
    ), _NORM_AFTER_NAMES),
    Family("granite", "Granite", "GraniteForCausalLM", _dense(
        _BIAS, _NO_MLP_BIAS, _NO_NORM, HeadDim(own=False), Rope(), Multipliers(),
    )),
)  # fmt: skip
FAMILIES = {family.model_type: family for family in (*_SPARSE, *_DENSE)}


def family_of(config: HFConfig) -> Family:
    """The family of a config. Raises InputError for another ``model_type``."""
    kind = config.values.get("model_type")
    if isinstance(kind, str) and kind in FAMILIES:
        return FAMILIES[kind]
    why = why_not_converted(kind) if isinstance(kind, str) else None
    if why is not None:
        raise InputError(f"{config.where}: model_type ({kind}) is not converted: {why}")
    raise config.wrong("model_type", f"be one of {', '.join(FAMILIES)}")


def expressing(model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> list[str]:
    """The model types that express a decoder."""
    return [kind for kind, of in FAMILIES.items() if of.refusal(model, moe, seq_len) is None]


def family_for(
    model: ModelConfig, moe: MoEConfig | None, seq_len: int, first: str | None = None
) -> Family:
    """The family ``first``, if it expresses a decoder, or else the first of all that does. Raises
    InputError, with every family's reason."""
    kinds = sorted(FAMILIES, key=lambda kind: kind != first)
    refusals = {kind: FAMILIES[kind].refusal(model, moe, seq_len) for kind in kinds}
    for kind, refusal in refusals.items():
        if refusal is None:
            return FAMILIES[kind]
    raise InputError(f"no family expresses this model: {'; '.join(map(str, refusals.values()))}")
