"""MoE blocks of ``transformers`` that can be adopted, and their options as fields of MoEConfig."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

Fields = dict[str, Any]


def _softmax(block: Any) -> Fields:
    return _weighting(block, block.gate.norm_topk_prob)


def _weighting(block: Any, normalized: bool) -> Fields:
    """The normalized weight of a single expert is 1: a softmax over the one chosen logit."""
    alone = normalized and block.gate.top_k == 1
    return {"norm_topk_prob": normalized and not alone, "softmax_after_topk": alone}


def _mixtral(block: Any) -> Fields:
    if block.jitter_noise:
        raise ValueError(
            f"router_jitter_noise ({block.jitter_noise}) must be 0: transformers also multiplies "
            f"the experts' input by the noise, and Convoy has no such option"
        )
    return _weighting(block, True)


def _deepseek_v3(block: Any) -> Fields:
    gate = block.gate
    return {
        "score_func": "sigmoid",
        "norm_topk_prob": gate.norm_topk_prob,
        "route_scale": float(gate.routed_scaling_factor),
        "n_groups": gate.num_group,
        "topk_groups": gate.topk_group,
        "topk_per_group": 2,
        "expert_bias": True,
        # The library has no auxiliary loss for this family: the coefficients are the paper's
        # (arXiv 2412.19437, section 4.2).
        "aux_loss_coeff": 0.0,
        "seq_aux_loss_coeff": 0.0001,
    }


class Family(NamedTuple):
    """A model family whose MoE blocks can be adopted."""

    name: str
    """For people."""
    block: str
    """The full name of the class."""
    read: Callable[[Any], Fields]
    """The fields of MoEConfig that this family's blocks have beside those of all families."""


_MODELS = "transformers.models"
FAMILIES = (
    Family("Mixtral", f"{_MODELS}.mixtral.modeling_mixtral.MixtralSparseMoeBlock", _mixtral),
    Family("OLMoE", f"{_MODELS}.olmoe.modeling_olmoe.OlmoeSparseMoeBlock", _softmax),
    Family("Qwen3-MoE", f"{_MODELS}.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock", _softmax),
    Family(
        "DeepSeek-V3", f"{_MODELS}.deepseek_v3.modeling_deepseek_v3.DeepseekV3MoE", _deepseek_v3
    ),
)
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
SUPPORTED = "moe.adopt supports " + ", ".join(
    f"{family.name} ({family.block.rpartition('.')[2]})" for family in FAMILIES
)
