"""Families with routed experts whose checkpoints are not converted, and what Convoy's decoder would
need."""

from __future__ import annotations

NOT_CONVERTED: dict[str, str] = {
    "afmoe": "its attention has sliding windows and an output gate, and layers have two more norms",
    "aria": "it has a vision tower",
    "axk1": "the output of its MoE blocks is normed again",
    "axk2": "its attention is sparse (an indexer chooses keys), and its norms are gated",
    "bailing_hybrid": "most of its layers have linear attention",
    "beam": "its attention has sliding windows and gates, and its residual stream has a scale for "
            "each depth",
    "cohere2_moe": "attention and experts of a layer read one norm side by side, and attention has "
                   "sliding windows",
    "dbrx": "its norms are LayerNorm, and it clips queries, keys and values",
    "deepseek_ocr2": "it has a vision tower",
    "deepseek_v32": "its attention is sparse: an indexer chooses keys",
    "deepseek_v4": "its attention is sparse and compressed, its residual stream has several lanes, "
                   "and some layers route by a hash",
    "diffusion_gemma": "it generates by diffusion, and its attention has sliding windows",
    "doge": "its attention has dynamic masks, and its experts are product keys of single vectors",
    "dots3_note": "it has vision and audio towers, and its attention is sparse",
    "ernie4_5_vl_moe": "it has a vision tower, and other experts for images than for text",
    "exaone_moe": "its attention has sliding windows, and layers without one have no rotary "
                  "positions",
    "flint": "its attention has sinks and sliding windows",
    "gemma4": "its attention has sliding windows, its layers several more norms, and there are "
              "experts beside a dense network",
    "glm4v_moe": "it has a vision tower, and rotary positions of several dims",
    "glm5_next": "it has a vision tower, linear attention, and a residual stream of several lanes",
    "glm_moe_dsa": "its attention is sparse: an indexer chooses keys",
    "gpt_oss": "its attention has sinks and sliding windows",
    "granitemoe_swa": "its attention has sinks and sliding windows",
    "granitemoehybrid": "most of its layers are Mamba layers",
    "hunyuan_v1_moe": "queries and keys are normed after the rotation",
    "hy_v4": "its attention is sparse and has sinks, and its residual stream has several lanes",
    "inkling": "it has vision and audio towers, sliding windows and short convolutions",
    "inkling2": "it has a vision tower, sinks, sliding windows and short convolutions",
    "jamba": "most of its layers are Mamba layers",
    "jetmoe": "the projections of its attention are experts too",
    "kimi_linear": "most of its layers have linear attention",
    "kolibri1": "its attention has sliding windows, and its layers two more norms",
    "laguna": "its attention has an output gate, and another number of heads in each layer",
    "lfm2_moe": "most of its layers are short convolutions",
    "llama4": "its attention is chunked, layers in turn have no rotary positions, and the weights "
              "of experts multiply their inputs",
    "longcat_flash": "a layer has two attentions and two dense networks, and some experts compute "
                     "nothing",
    "mimo_v2_flash": "its attention has sinks and sliding windows",
    "minimax": "most of its layers have linear attention",
    "minimax_m3_vl": "it has a vision tower, and its attention is sparse",
    "mistral4": "queries are scaled by their position",
    "mistral_large4": "it has a vision tower, its attention is sparse, and some layers have no "
                      "rotary positions",
    "muse_spark": "it has vision and audio towers, and its attention sliding windows",
    "nemotron_h": "most of its layers are Mamba layers",
    "nllb_moe": "it is an encoder and a decoder, with learned positions",
    "openai_privacy_filter": "it classifies tokens, with sinks and attention in both directions",
    "phimoe": "its norms are LayerNorm, and its router samples by sparsemixer",
    "qwen3_5_moe": "most of its layers have linear attention",
    "qwen3_next": "most of its layers have linear attention",
    "qwen3_omni_moe": "it has vision and audio towers, and speaks",
    "qwen3_vl_moe": "it has a vision tower, and rotary positions of several dims",
    "qwen4_exp": "it has a vision tower, linear and sparse attention, and a residual stream of "
                 "several lanes",
    "step3p7": "it has a vision tower, and its attention sliding windows and an output gate",
    "switch_transformers": "it is an encoder and a decoder, with relative biases for positions",
    "unlimited_ocr": "it has a vision tower",
    "vitpose_backbone": "it is a vision model, and its experts are chosen by the data set",
    "zaya": "queries and keys pass a convolution, and its router is a network with a memory of the "
            "layer before",
}  # fmt: skip
"""By ``model_type``, which is also the folder of ``transformers.models``: the feature, for
people."""
_PARTS = {"inkling_mm_model": "inkling", "step3p5": "step3p7"}
"""Other names in a config.json of what these folders have."""


def why_not_converted(model_type: str) -> str | None:
    """The sentence for a ``model_type``, or for a text model that is a part of one; None for a
    family that is not known."""
    kind = _PARTS.get(model_type, model_type.removesuffix("_text"))
    return NOT_CONVERTED.get(kind)
