"""The families of ``transformers`` 5.23 with routed experts: which can be adopted, and how.

One entry for each class of MoE blocks. An entry declares what the blocks are, or says why they
cannot be adopted.
"""

from __future__ import annotations

from dataclasses import replace

from moe.adoption.kinds import (
    FLAT,
    INPUT_FIRST,
    INTERLEAVED,
    JITTER,
    UNGATED,
    WITH_BIASES,
    Family,
    Kind,
    Must,
)

# ------------------------------------------------------------------------------------------------
# Softmax scores.

_SOFTMAX = Kind(normalize=".gate.norm_topk_prob")
_NORMED = Kind(normalize=True)
_MIXTRAL = Kind(top_k=".top_k", normalize=True, must=(JITTER,))
_QWEN2 = replace(_SOFTMAX, shared="shared_expert", shared_gate="shared_expert_gate")
_GRANITE = Kind(gate="router", top_k=".router.top_k", after_topk=True)
_DEEPSEEK_V2 = Kind(
    scale=".gate.routed_scaling_factor",
    groups=(".gate.num_group", ".gate.topk_group"),
    per_group=1,
    shared="shared_experts",
)
_MISTRAL_4 = replace(_DEEPSEEK_V2, normalize=".gate.norm_topk_prob", per_group=2)
_ERNIE = Kind(
    correction="gate.moe_statics.e_score_correction_bias", normalize=True, shared="shared_experts"
)
_COHERE = Kind(
    score=".gate.expert_selection_fn",
    after_topk=True,
    normalize=".gate.norm_topk_prob",
    shared="shared_experts",
    halved=".shared_expert_combination_strategy",
)
_DBRX = Kind(
    gate="router",
    weight="layer.weight",
    top_k=".top_k",
    normalize=".moe_normalize_expert_weights",
    experts=FLAT,
    must=(
        Must(".moe_normalize_expert_weights", (1, None), "moe_normalize_expert_weights",
             "Convoy scales weights to a sum of 1, and by no other norm"),
        Must(".router.moe_jitter_eps", (None, 0), "moe_jitter_eps", JITTER.why),
    ),
)  # fmt: skip
_GPT_OSS = Kind(
    gate="router",
    logit_bias="bias",
    top_k=".router.top_k",
    after_topk=True,
    experts=INTERLEAVED,
    activation="swiglu_oai",
    limit=".experts.limit",
    pair=True,
    must=(
        Must(".experts.alpha", (1.702,), "swiglu_alpha",
             "the activation swiglu_oai has gpt-oss's own"),
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------------
# Sigmoid scores.

_SIGMOID = Kind(
    score="sigmoid", correction="gate.e_score_correction_bias", normalize=".gate.norm_topk_prob"
)
_UNSHARED_V3 = replace(
    _SIGMOID,
    scale=".gate.routed_scaling_factor",
    groups=(".gate.num_group", ".gate.topk_group"),
)
_DEEPSEEK_V3 = replace(_UNSHARED_V3, shared="shared_experts")
_LIMITED_V3 = replace(_DEEPSEEK_V3, limit=".experts.swiglu_limit")
_NO_GROUPS = Must(
    ".gate.num_group", (None,), "n_group",
    "transformers gives the experts of left-out groups a score of 0, which negative biases are "
    "below",
)  # fmt: skip
_NEMOTRON = replace(
    _DEEPSEEK_V3,
    experts=UNGATED,
    sees_mask=False,
    must=(
        Must(".config.moe_latent_size", (None,), "moe_latent_size",
             "Convoy's experts take the router's input, not a projection of it"),
    ),
)  # fmt: skip
_MINIMAX_M2 = Kind(
    top_k=".top_k", score="sigmoid", correction="e_score_correction_bias", normalize=True,
    must=(JITTER,),
)  # fmt: skip
_MINIMAX_M3 = replace(
    _SIGMOID, normalize=True, scale=".routed_scaling_factor", shared="shared_experts",
    activation="swiglu_oai", limit=".experts.swiglu_limit",
    must=(replace(_GPT_OSS.must[0], path=".experts.swiglu_alpha"),),
)  # fmt: skip
_STEP = replace(
    _SIGMOID, normalize=True, scale=".routed_scaling_factor", shared="shared_experts",
    must=(
        Must(".experts.limit", (float("inf"),), "swiglu_limits",
             "transformers clamps this family's gates after the activation"),
    ),
)  # fmt: skip
_LAGUNA = replace(
    _SIGMOID, normalize=True, scale=".routed_scaling_factor", shared="shared_experts",
    must=(
        Must(".gate.router_logit_softcapping", (0, None), "moe_router_logit_softcapping",
             "Convoy's router has no soft cap on its logits"),
    ),
)  # fmt: skip
_HY_V3 = Kind(
    score="sigmoid",
    correction="e_score_correction_bias",
    normalize=True,
    scale=".gate.router_scaling_factor",
    shared="shared_experts",
)
_AFMOE = Kind(
    gate="router",
    weight="gate.weight",
    correction="expert_bias",
    top_k=".router.top_k",
    score="sigmoid",
    normalize=True,
    scale=".router.route_scale",
    shared="shared_experts",
)
_LFM2 = Kind(
    correction="expert_bias",
    score="sigmoid",
    normalize=".gate.norm_topk_prob",
    scale=".gate.routed_scaling_factor",
)
_LLAMA_4 = Kind(
    gate="router",
    top_k=".top_k",
    score="sigmoid",
    logits_at=1,
    experts=INPUT_FIRST,
    on_input=True,
    shared="shared_expert",
    pair=True,
)
_DEEPSEEK_V4 = Kind(
    score="sqrtsoftplus",
    correction="gate.e_score_correction_bias",
    table="tid2eid",
    normalize=True,
    scale=".gate.routed_scaling_factor",
    shared="shared_experts",
    limit=".experts.limit",
    must=(
        Must(".gate.score_fn.__class__.__name__", ("SqrtSoftplusActivation",), "scoring_func",
             "this family's declaration has sqrtsoftplus"),
    ),
)  # fmt: skip

_NO_BLOCK = "experts and router are parts of the decoder layer, which routes another input"
TABLE: tuple[Family, ...] = (
    Family("mixtral", "Mixtral", "MixtralSparseMoeBlock", _MIXTRAL),
    Family("olmoe", "OLMoE", "OlmoeSparseMoeBlock", _SOFTMAX),
    Family("qwen3_moe", "Qwen3-MoE", "Qwen3MoeSparseMoeBlock", _SOFTMAX),
    Family("deepseek_v3", "DeepSeek-V3", "DeepseekV3MoE", _DEEPSEEK_V3),
    Family("qwen2_moe", "Qwen2-MoE", "Qwen2MoeSparseMoeBlock", _QWEN2),
    Family("qwen3_next", "Qwen3-Next", "Qwen3NextSparseMoeBlock", _QWEN2),
    Family("qwen3_5_moe", "Qwen3.5-MoE", "Qwen3_5MoeSparseMoeBlock",
           replace(_QWEN2, normalize=True)),
    Family("qwen3_vl_moe", "Qwen3-VL-MoE", "Qwen3VLMoeTextSparseMoeBlock", _NORMED),
    Family("qwen3_omni_moe", "Qwen3-Omni-MoE thinker", "Qwen3OmniMoeThinkerTextSparseMoeBlock",
           _SOFTMAX),
    Family("qwen3_omni_moe", "Qwen3-Omni-MoE talker", "Qwen3OmniMoeTalkerTextSparseMoeBlock",
           _QWEN2),
    Family("qwen4_exp", "Qwen4-Exp", "Qwen4ExpTextSparseMoeBlock", _QWEN2),
    Family("glm4_moe", "GLM-4-MoE", "Glm4MoeMoE", _DEEPSEEK_V3),
    Family("glm4_moe_lite", "GLM-4-MoE-Lite", "Glm4MoeLiteMoE", _DEEPSEEK_V3),
    Family("glm4v_moe", "GLM-4V-MoE", "Glm4vMoeTextMoE", _DEEPSEEK_V3),
    Family("glm_moe_dsa", "GLM-MoE-DSA", "GlmMoeDsaMoE", _DEEPSEEK_V3),
    Family("glm5_next", "GLM-5-Next", "Glm5NextTextMoE", _LIMITED_V3),
    Family("minimax", "MiniMax", "MiniMaxSparseMoeBlock", _MIXTRAL),
    Family("minimax_m2", "MiniMax-M2", "MiniMaxM2SparseMoeBlock", _MINIMAX_M2),
    Family("minimax_m3_vl", "MiniMax-M3-VL", "MiniMaxM3VLSparseMoeBlock", _MINIMAX_M3),
    Family("kimi_linear", "Kimi-Linear", "KimiLinearMoE", _DEEPSEEK_V3),
    Family("dots1", "dots.llm1", "Dots1MoE", _DEEPSEEK_V3),
    Family("dots3_note", "dots3-note text", "Dots3NoteTextMoE", _DEEPSEEK_V3),
    Family("dots3_note", "dots3-note vision", "Dots3NoteVisionMoE", why_not=(
        "it routes packed patches of images, which Convoy's layers are not tested with")),
    Family("deepseek_v2", "DeepSeek-V2", "DeepseekV2Moe", _DEEPSEEK_V2),
    Family("deepseek_v32", "DeepSeek-V3.2", "DeepseekV32MoE", _DEEPSEEK_V3),
    Family("deepseek_v4", "DeepSeek-V4", "DeepseekV4SparseMoeBlock", _DEEPSEEK_V4),
    Family("deepseek_ocr2", "DeepSeek-OCR-2", "DeepseekOcr2TextMoe", _DEEPSEEK_V2),
    Family("unlimited_ocr", "Unlimited-OCR", "UnlimitedOcrTextMoe", _DEEPSEEK_V2),
    Family("granitemoe", "Granite-MoE", "GraniteMoeMoE", _GRANITE),
    Family("granitemoeshared", "Granite-MoE-Shared", "GraniteMoeSharedMoE", _GRANITE),
    Family("granitemoehybrid", "Granite-MoE-Hybrid", "GraniteMoeHybridMoE", _GRANITE),
    Family("granitemoe_swa", "Granite-MoE-SWA", "GraniteMoeSWAMoE", _GRANITE),
    Family("jamba", "Jamba", "JambaSparseMoeBlock",
           Kind(gate="router", top_k=".router.top_k")),
    Family("gpt_oss", "gpt-oss", "GptOssMLP", _GPT_OSS),
    Family("openai_privacy_filter", "OpenAI privacy filter", "OpenAIPrivacyFilterMLP",
           replace(_GPT_OSS, experts=WITH_BIASES)),
    Family("llama4", "Llama 4", "Llama4TextMoe", _LLAMA_4),
    Family("nemotron_h", "Nemotron-H", "NemotronHMoE", _NEMOTRON),
    Family("ernie4_5_moe", "ERNIE 4.5 MoE", "Ernie4_5_MoeSparseMoeBlock", _ERNIE),
    Family("hunyuan_v1_moe", "Hunyuan-MoE", "HunYuanMoEV1Moe",
           replace(_NORMED, weight="wg.weight", shared="shared_mlp")),
    Family("hy_v3", "Hunyuan V3", "HYV3MoE", _HY_V3),
    Family("hy_v4", "Hunyuan V4", "HYV4MoE", _LIMITED_V3),
    Family("lfm2_moe", "LFM2-MoE", "Lfm2MoeSparseMoeBlock", _LFM2),
    Family("flex_olmo", "FlexOlmo", "FlexOlmoSparseMoeBlock", _SOFTMAX),
    Family("dbrx", "DBRX", "DbrxFFN", _DBRX),
    Family("afmoe", "AFMoE", "AfmoeSparseMoeBlock", _AFMOE),
    Family("exaone_moe", "EXAONE-MoE", "ExaoneMoeSparseMoEBlock", _DEEPSEEK_V3),
    Family("mistral4", "Mistral 4", "Mistral4MoE", _MISTRAL_4),
    Family("mistral_large4", "Mistral Large 4", "MistralLarge4TextMoE",
           replace(_MISTRAL_4, normalize=True)),
    Family("solar_open", "Solar Open", "SolarOpenMoE", _DEEPSEEK_V3),
    Family("bailing_hybrid", "Bailing-Hybrid", "BailingHybridMoE", _DEEPSEEK_V3),
    Family("mimo_v2_flash", "MiMo-V2-Flash", "MiMoV2FlashMoE", _UNSHARED_V3),
    Family("axk1", "A.X K1", "AXK1MoE", replace(_DEEPSEEK_V3, after="post_mlp_layernorm")),
    Family("axk2", "A.X K2", "AXK2MoE", replace(_DEEPSEEK_V3, must=(_NO_GROUPS,))),
    Family("aria", "Aria", "AriaTextMoELayer",
           replace(_GRANITE, experts=INPUT_FIRST, shared="shared_experts")),
    Family("beam", "Beam", "BeamMoE",
           replace(_UNSHARED_V3, scale=".routed_scaling_factor")),
    Family("cohere2_moe", "Cohere2-MoE", "Cohere2MoeSparseMoeBlock", _COHERE),
    Family("flint", "Flint", "FlintSparseMoeBlock",
           replace(_SIGMOID, correction="", shared="shared_expert")),
    Family("laguna", "Laguna", "LagunaSparseMoeBlock", _LAGUNA),
    Family("mellum", "Mellum", "MellumSparseMoeBlock", _SOFTMAX),
    Family("step3p7", "Step-3.7", "Step3p7SparseMoeBlock", _STEP),
    Family("phimoe", "Phi-MoE", "PhimoeSparseMoeBlock", why_not=(
        "its router takes SparseMixer's weights, each from a softmax over the logits near its own, "
        "with noise in training")),
    Family("longcat_flash", "LongCat-Flash", "LongcatFlashMoE", why_not=(
        "some of its experts give their input back, without parameters")),
    Family("gemma4", "Gemma 4", "Gemma4TextDecoderLayer", why_not=_NO_BLOCK),
    Family("diffusion_gemma", "DiffusionGemma encoder", "DiffusionGemmaEncoderTextLayer",
           why_not=_NO_BLOCK),
    Family("diffusion_gemma", "DiffusionGemma decoder", "DiffusionGemmaDecoderTextLayer",
           why_not=_NO_BLOCK),
    Family("ernie4_5_vl_moe", "ERNIE 4.5 VL MoE", "Ernie4_5_VLMoeMoeBlock", why_not=(
        "tokens of text and of images have experts of two sizes in one block")),
    Family("ernie4_5_vl_moe", "ERNIE 4.5 VL MoE experts", "Ernie4_5_VLMoeSparseMoeBlock", why_not=(
        "tokens of text and of images have experts of two sizes in one block")),
    Family("muse_spark", "Muse Spark", "MuseSparkMoE", why_not=(
        "each expert's output passes through a norm, and the experts' input through a projection")),
    Family("inkling", "Inkling", "InklingMoE", why_not=(
        "its router weighs shared experts too, within one normalization")),
    Family("inkling2", "Inkling 2", "Inkling2SparseMoeBlock", why_not=(
        "its experts bound gate and up by soft caps")),
    Family("kolibri1", "Kolibri 1", "Kolibri1SparseMoeBlock", why_not=(
        "its router adds biases to logits for the choice, and Convoy's adds them to scores")),
    Family("zaya", "Zaya", "ZayaSparseMoeBlock", why_not=(
        "its router is a network with a state from layer to layer, and may skip all experts")),
    Family("jetmoe", "JetMoE", "JetMoeMoE", why_not=(
        "its attention routes among experts too, and its experts have one bias together")),
    Family("jetmoe", "JetMoE attention", "JetMoeAttention", why_not=(
        "attention whose projections are experts is not a feed-forward layer")),
    Family("doge", "Doge", "DogeCDMoE", why_not=(
        "its experts are pairs of vectors that product keys choose")),
    Family("switch_transformers", "Switch Transformers", "SwitchTransformersSparseMLP", why_not=(
        "its experts are separate modules with capacities counted over a sequence")),
    Family("nllb_moe", "NLLB-MoE", "NllbMoeSparseMLP", why_not=(
        "its experts are separate modules with capacities, and its second expert may be drawn")),
    Family("vitpose_backbone", "ViTPose", "VitPoseBackboneMoeMLP", why_not=(
        "the data set chooses the expert: there is no router")),
)  # fmt: skip
"""All families: for code that reads which can be adopted, as a table of families does."""

BY_BLOCK = {family.full_name: family for family in TABLE}
ADOPTED = tuple(family for family in TABLE if family.adopt)
SUPPORTED = (
    f"moe.adopt supports {len(ADOPTED)} of the {len(TABLE)} families in "
    f"moe.adoption.families.TABLE, such as Mixtral, Qwen3-MoE and DeepSeek-V3"
)
