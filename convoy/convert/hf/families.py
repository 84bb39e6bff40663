"""Hugging Face model families: what their configs say in Convoy's words, and what they can say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from convoy.convert.hf.deepseek import (
    read_deepseek_v2,
    read_deepseek_v3,
    read_dots1,
    write_deepseek_v2,
    write_deepseek_v3,
    write_dots1,
)
from convoy.convert.hf.model_config import HFConfig, head_dim, read_decoder, write_decoder
from moe import MoEConfig
from pretrain.errors import InputError
from pretrain.model import ModelConfig

Sections = tuple[dict[str, Any], dict[str, Any] | None]
"""``[model]`` and, where there is one, ``[moe]``."""

_MIXTRAL_NAMES = {
    "moe.router.weight": "block_sparse_moe.gate.weight",
    "moe.experts.w_gate": "block_sparse_moe.experts.{expert}.w1.weight",
    "moe.experts.w_up": "block_sparse_moe.experts.{expert}.w3.weight",
    "moe.experts.w_down": "block_sparse_moe.experts.{expert}.w2.weight",
}


@dataclass(frozen=True)
class Family:
    """One ``model_type``: how its config reads, and what of Convoy's it can express."""

    model_type: str
    architecture: str
    read: Callable[[HFConfig], Sections]
    """The sections of a config, values that Convoy lacks refused."""
    needs: dict[str, tuple[Any, ...]]
    """By ``section.field``, the values that can be expressed; ``moe`` is whether there is one."""
    write: Callable[[ModelConfig, MoEConfig | None], dict[str, Any]]
    """The values of config.json besides those that all families have."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """What the family takes for values that a config.json leaves out."""
    names: dict[str, str] = field(default_factory=dict)
    """Tensors that are not called as in the others, for :func:`convoy.convert.hf.hf_tensors`."""

    def sections(self, config: HFConfig) -> Sections:
        """``[model]`` and ``[moe]`` of a config. Raises InputError where they cannot be."""
        common = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
        return self.read(config.with_defaults({**common, **self.defaults}))

    def config(self, model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> dict[str, Any]:
        """config.json. Raises InputError for the first value that the family cannot express."""
        for name, allowed in {"model.num_mtp_layers": (0,), **self.needs}.items():
            found = expressed(name, model, moe)
            if found not in allowed:
                rule = " or ".join(_toml(value) for value in allowed if value is not None)
                raise InputError(
                    f"{name} ({_toml(found)}) must be {rule} to be a {self.model_type} model"
                )
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            **write_decoder(model, seq_len),
            **self.write(model, moe),
        }

    def refusal(self, model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> InputError | None:
        """Why the family cannot express a decoder; None where it can."""
        try:
            self.config(model, moe, seq_len)
        except InputError as error:
            return error
        return None


def expressed(name: str, model: ModelConfig, moe: MoEConfig | None) -> Any:
    """A field by ``section.field``, or one of the derived names that families speak of."""
    if name == "moe":
        return moe is not None
    section, field_name = name.split(".", 1)
    if section == "model":
        return getattr(model, field_name)
    assert moe is not None, "moe is asked for first"
    if field_name == "routing" and moe.routing_traits.top_k_in_evaluation:
        return "top_k"
    if field_name == "norm_topk_prob":  # a softmax over the chosen logits is one over all, normed
        return moe.norm_topk_prob or moe.softmax_after_topk
    if field_name == "topk_per_group" and moe.n_groups == 1:
        return None  # there is nothing to choose
    return attrgetter(field_name)(moe)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_GROUPED = {"model.latent": (False,), "model.rope_interleaved": (False,)}
_MOE = {
    "moe": (True,),
    "moe.capacity.policy": ("dropless",),
    "moe.capacity.max_tokens_per_rank": (0,),
    "moe.activation": ("swiglu",),
    "moe.activation_limit": (0.0,),
    "moe.weights_on_input": (False,),
    "moe.router_bias": (False,),
    "moe.ffn_bias": (False,),
    "moe.shared_expert_gate": (False,),
    "moe.routing": ("top_k",),  # or another one that is the plain choice in evaluation
}
_SOFTMAX = {
    **_MOE,
    **_GROUPED,
    "moe.score_func": ("softmax",),
    "moe.n_groups": (1,),
    "moe.expert_bias": (False,),
    "moe.num_shared_experts": (0,),
    "moe.route_scale": (1.0,),
}

_SIGMOID = {
    **_MOE,
    "moe.score_func": ("sigmoid",),
    "moe.expert_bias": (True,),
    "moe.topk_per_group": (2, None),
}


def _dense(qk_norm: str) -> Callable[[HFConfig], Sections]:
    def read(config: HFConfig) -> Sections:
        model = read_decoder(config)
        model |= {"qk_norm": qk_norm, "d_ff": config.size("intermediate_size")}
        return model | head_dim(config), None

    return read


def _write_dense(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    return {"head_dim": model.qk_head_dim, "intermediate_size": model.d_ff, "mlp_bias": False,
            "sliding_window": None, "use_sliding_window": False}  # fmt: skip


def weighting(config: HFConfig, normalized: bool) -> dict[str, Any]:
    """How many experts a token has, and their weights: a softmax, ``normalized`` to a sum of 1.

    The normalized weight of a single expert is 1. Convoy says that as a softmax over the chosen
    logits, because ``norm_topk_prob`` with one expert is most often a mistake.
    """
    top_k = config.size("num_experts_per_tok")
    return {
        "top_k": top_k,
        "norm_topk_prob": normalized and top_k > 1,
        "softmax_after_topk": normalized and top_k == 1,
    }


def _read_mixtral(config: HFConfig) -> Sections:
    model = read_decoder(config) | {"qk_norm": "none"} | head_dim(config)
    return model, {
        "num_experts": config.size("num_local_experts"),
        **weighting(config, True),
        "d_ff": config.size("intermediate_size"),
        "aux_loss_coeff": config.number("router_aux_loss_coef", 0.001),
        "input_jitter": config.number("router_jitter_noise", 0.0),
    }


def _write_mixtral(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    assert moe is not None
    return {
        "head_dim": model.qk_head_dim,
        "intermediate_size": moe.d_ff,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "router_jitter_noise": moe.input_jitter,
        "sliding_window": None,
    }


def _read_olmoe(config: HFConfig) -> Sections:
    if "clip_qkv" in config.values:
        raise config.wrong("clip_qkv", "be null")
    model = read_decoder(config) | {"qk_norm": "all_heads"}
    return model, _read_softmax(config, "intermediate_size", 0.01)


def _read_softmax(config: HFConfig, d_ff: str, balance: float) -> dict[str, Any]:
    config.must("router_jitter_noise", 0)
    experts = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    return {
        "num_experts": config.size(experts),
        **weighting(config, config.flag("norm_topk_prob")),
        "d_ff": config.size(d_ff),
        "aux_loss_coeff": config.number("router_aux_loss_coef", balance),
    }


def _write_softmax(moe: MoEConfig) -> dict[str, Any]:
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "norm_topk_prob": moe.norm_topk_prob or moe.softmax_after_topk,
        "router_aux_loss_coef": moe.aux_loss_coeff,
    }


def _write_olmoe(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    assert moe is not None
    if model.qk_head_dim * model.num_heads != model.d_model:
        raise InputError(
            f"model.head_dim ({model.qk_head_dim}) must be model.d_model / model.num_heads "
            f"({model.d_model} / {model.num_heads}) to be a olmoe model"
        )
    return {"intermediate_size": moe.d_ff, "clip_qkv": None, **_write_softmax(moe)}


def _read_qwen3_moe(config: HFConfig) -> Sections:
    config.must("decoder_sparse_step", 1)
    dense = config.values.get("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        raise config.wrong("mlp_only_layers", "be the first layers, in order")
    model = read_decoder(config) | {"qk_norm": "head", "first_k_dense": len(dense)}
    if dense:
        model["d_ff"] = config.size("intermediate_size")
    return model | head_dim(config), _read_softmax(config, "moe_intermediate_size", 0.001)


def _write_qwen3_moe(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    assert moe is not None
    return {
        "head_dim": model.qk_head_dim,
        "intermediate_size": model.d_ff or moe.d_ff,
        "moe_intermediate_size": moe.d_ff,
        "mlp_only_layers": list(range(model.first_k_dense)),
        "decoder_sparse_step": 1,
        "sliding_window": None,
        "use_sliding_window": False,
        **_write_softmax(moe),
    }


_NO_NORM = {"model.qk_norm": ("none",)}
_FAMILIES = (
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", _read_qwen3_moe,
        {**_SOFTMAX, "model.qk_norm": ("head",)}, _write_qwen3_moe,
    ),
    Family(
        "olmoe", "OlmoeForCausalLM", _read_olmoe,
        {**_SOFTMAX, "model.qk_norm": ("all_heads",), "model.first_k_dense": (0,)},
        _write_olmoe, {"rms_norm_eps": 1e-5},
    ),
    Family(
        "mixtral", "MixtralForCausalLM", _read_mixtral,
        {**_SOFTMAX, **_NO_NORM, "model.first_k_dense": (0,), "moe.norm_topk_prob": (True,)},
        _write_mixtral, {"rms_norm_eps": 1e-5, "rope_theta": 1e6}, _MIXTRAL_NAMES,
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek_v3,
        {"moe": (True,), "model.latent": (True,), **_SIGMOID,
         "model.num_mtp_layers": tuple(range(9))},
        write_deepseek_v3,
    ),
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek_v2,
        {**_MOE, "model.latent": (True,), "model.rope_interleaved": (True,),
         "moe.score_func": ("softmax",), "moe.expert_bias": (False,),
         "moe.norm_topk_prob": (False,), "moe.topk_per_group": (1, None)},
        write_deepseek_v2,
    ),
    Family(
        "dots1", "Dots1ForCausalLM", read_dots1,
        {**_SIGMOID, **_GROUPED, "model.qk_norm": ("head",)}, write_dots1,
    ),
    Family(
        "qwen3", "Qwen3ForCausalLM", _dense("head"),
        {"moe": (False,), **_GROUPED, "model.qk_norm": ("head",)}, _write_dense,
        {"head_dim": 128},
    ),
    Family(
        "mistral", "MistralForCausalLM", _dense("none"),
        {"moe": (False,), **_GROUPED, **_NO_NORM}, _write_dense,
        {"sliding_window": 4096},
    ),
    Family(
        "llama", "LlamaForCausalLM", _dense("none"),
        {"moe": (False,), **_GROUPED, **_NO_NORM}, _write_dense,
    ),
)  # fmt: skip
FAMILIES = {family.model_type: family for family in _FAMILIES}


def family_of(config: HFConfig) -> Family:
    """The family of a config. Raises InputError for another ``model_type``."""
    kind = config.values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise config.wrong("model_type", f"be one of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def expressing(model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> list[str]:
    """The model types that express a decoder."""
    return [kind for kind, of in FAMILIES.items() if of.refusal(model, moe, seq_len) is None]


def family_for(model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> Family:
    """The first family that expresses a decoder. Raises InputError, with every family's reason."""
    refusals = {kind: of.refusal(model, moe, seq_len) for kind, of in FAMILIES.items()}
    for kind, refusal in refusals.items():
        if refusal is None:
            return FAMILIES[kind]
    raise InputError(f"no family expresses this model: {'; '.join(map(str, refusals.values()))}")
