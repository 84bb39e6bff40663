"""Hugging Face model families: what their configs say in Convoy's words, and what they can say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from moe import MoEConfig
from pretrain.convert.hf.config import HFConfig, read_decoder, write_decoder
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
    """Tensors that are not called as in the others, for :func:`pretrain.convert.hf.hf_tensors`."""

    def sections(self, config: HFConfig) -> Sections:
        """``[model]`` and ``[moe]`` of a config. Raises InputError where they cannot be."""
        common = {"rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
        return self.read(config.with_defaults({**common, **self.defaults}))

    def config(self, model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> dict[str, Any]:
        """config.json. Raises InputError for the first value that the family cannot express."""
        for name, allowed in self.needs.items():
            found = expressed(name, model, moe)
            if found not in allowed:
                rule = " or ".join(_toml(value) for value in allowed)
                raise InputError(
                    f"{name} ({_toml(found)}) must be {rule} to be a {self.model_type} model"
                )
        return {
            "model_type": self.model_type,
            "architectures": [self.architecture],
            **write_decoder(model, seq_len),
            **self.write(model, moe),
        }


def expressed(name: str, model: ModelConfig, moe: MoEConfig | None) -> Any:
    """A field by ``section.field``, or one of the derived names that families speak of."""
    if name == "moe":
        return moe is not None
    section, field_name = name.split(".", 1)
    if section == "model":
        return getattr(model, field_name)
    assert moe is not None, "moe is asked for first"
    if field_name == "norm_topk_prob":  # a softmax over the chosen logits is one over all, normed
        return moe.norm_topk_prob or moe.softmax_after_topk
    if field_name == "topk_per_group" and moe.n_groups == 1:
        return 2  # there is nothing to choose
    return attrgetter(field_name)(moe)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_GROUPED = {"model.latent": (False,), "model.rope_interleaved": (False,)}
_MOE = {
    "moe": (True,),
    "moe.capacity.policy": ("dropless",),
    "moe.capacity.max_tokens_per_rank": (0,),
    "moe.activation": ("swiglu",),
    "moe.ffn_bias": (False,),
    "moe.shared_expert_gate": (False,),
    "moe.routing": ("top_k", "sinkhorn"),  # sinkhorn is the plain choice in evaluation
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


def _dense(qk_norm: str) -> Callable[[HFConfig], Sections]:
    def read(config: HFConfig) -> Sections:
        model = read_decoder(config)
        model |= {"qk_norm": qk_norm, "d_ff": config.size("intermediate_size")}
        return model | _head_dim(config), None

    return read


def _head_dim(config: HFConfig) -> dict[str, Any]:
    return {"head_dim": config.size("head_dim")} if "head_dim" in config.values else {}


def _write_dense(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    return {"head_dim": model.qk_head_dim, "intermediate_size": model.d_ff, "mlp_bias": False,
            "sliding_window": None, "use_sliding_window": False}  # fmt: skip


def _read_mixtral(config: HFConfig) -> Sections:
    model = read_decoder(config) | {"qk_norm": "none"} | _head_dim(config)
    return model, {
        "num_experts": config.size("num_local_experts"),
        "top_k": config.size("num_experts_per_tok"),
        "d_ff": config.size("intermediate_size"),
        "aux_loss_coeff": config.number("router_aux_loss_coef", 0.001),
    }


def _write_mixtral(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    assert moe is not None
    return {
        "head_dim": model.qk_head_dim,
        "intermediate_size": moe.d_ff,
        "num_local_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "router_aux_loss_coef": moe.aux_loss_coeff,
        "sliding_window": None,
    }


def _read_olmoe(config: HFConfig) -> Sections:
    if "clip_qkv" in config.values:
        raise config.wrong("clip_qkv", "be null")
    model = read_decoder(config) | {"qk_norm": "all_heads"}
    return model, _read_softmax(config, "intermediate_size", 0.01)


def _read_softmax(config: HFConfig, d_ff: str, balance: float) -> dict[str, Any]:
    experts = "num_local_experts" if "num_local_experts" in config.values else "num_experts"
    return {
        "num_experts": config.size(experts),
        "top_k": config.size("num_experts_per_tok"),
        "d_ff": config.size(d_ff),
        "norm_topk_prob": config.flag("norm_topk_prob"),
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
    return model | _head_dim(config), _read_softmax(config, "moe_intermediate_size", 0.001)


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


_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _read_deepseek_v3(config: HFConfig) -> Sections:
    config.must("scoring_func", "sigmoid")
    config.must("topk_method", "noaux_tc")
    config.must("moe_layer_freq", 1)
    dense = config.size("first_k_dense_replace")
    model = read_decoder(config) | {name: config.size(name) for name in _LATENT_SIZES}
    model |= {
        "qk_norm": "none",
        "q_lora_rank": config.size("q_lora_rank", 0),
        "rope_interleaved": config.flag("rope_interleave", True),
        "first_k_dense": dense,
    }
    if dense:
        model["d_ff"] = config.size("intermediate_size")
    return model, {
        "num_experts": config.size("n_routed_experts"),
        "top_k": config.size("num_experts_per_tok"),
        "d_ff": config.size("moe_intermediate_size"),
        "num_shared_experts": config.size("n_shared_experts"),
        "score_func": "sigmoid",
        "norm_topk_prob": config.flag("norm_topk_prob", True),
        "route_scale": config.number("routed_scaling_factor"),
        "n_groups": config.size("n_group"),
        "topk_groups": config.size("topk_group"),
        "topk_per_group": 2,
        "expert_bias": True,
        "aux_loss_coeff": 0.0,
        # The paper's (arXiv 2412.19437, section 4.2); a config.json has it not.
        "seq_aux_loss_coeff": 0.0001,
    }


def _write_deepseek_v3(model: ModelConfig, moe: MoEConfig | None) -> dict[str, Any]:
    assert moe is not None
    if moe.num_shared_experts == 0:
        raise InputError("moe.num_shared_experts (0) must be at least 1 to be a deepseek_v3 model")
    if moe.num_experts // moe.n_groups < 2:
        raise InputError(
            f"moe.num_experts ({moe.num_experts}) must be at least 2 for each of moe.n_groups "
            f"({moe.n_groups}) to be a deepseek_v3 model"
        )
    return {
        **{name: getattr(model, name) for name in _LATENT_SIZES},
        "q_lora_rank": model.q_lora_rank or None,
        "rope_interleave": model.rope_interleaved,
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
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
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
        "deepseek_v3", "DeepseekV3ForCausalLM", _read_deepseek_v3,
        {**_MOE, "model.latent": (True,), "moe.score_func": ("sigmoid",),
         "moe.expert_bias": (True,), "moe.topk_per_group": (2,)},
        _write_deepseek_v3,
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


def family_for(model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> Family:
    """The first family that expresses a decoder. Raises InputError, with every family's reason."""
    reasons = []
    for family in _FAMILIES:
        try:
            family.config(model, moe, seq_len)
        except InputError as error:
            reasons.append(str(error))
        else:
            return family
    raise InputError(f"no family expresses this model: {'; '.join(reasons)}")
