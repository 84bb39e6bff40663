"""A Hugging Face ``config.json`` and the decoder that it describes, both ways."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pretrain.errors import InputError
from pretrain.model import ModelConfig

_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}


_NAMES = {
    "model.vocab_size": ("vocab_size",),
    "model.d_model": ("hidden_size",),
    "model.num_layers": ("num_hidden_layers",),
    "model.num_mtp_layers": ("num_nextn_predict_layers",),
    "model.num_heads": ("num_attention_heads",),
    "model.num_kv_heads": ("num_key_value_heads",),
    "model.d_ff": ("intermediate_size",),
    "model.norm_eps": ("rms_norm_eps",),
    "model.tie_embeddings": ("tie_word_embeddings",),
    "model.max_seq_len": ("max_position_embeddings",),
    "model.first_k_dense": ("first_k_dense_replace", "mlp_only_layers"),
    "model.rope_interleaved": ("rope_interleave",),
    **{
        f"model.{name}": (name,)
        for name in ("head_dim", "rope_theta", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
                     "qk_rope_head_dim", "v_head_dim")
    },
    "moe.d_model": ("hidden_size",),
    "moe.num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "moe.top_k": ("num_experts_per_tok",),
    "moe.d_ff": ("moe_intermediate_size", "intermediate_size"),
    "moe.num_shared_experts": ("n_shared_experts",),
    "moe.norm_topk_prob": ("norm_topk_prob",),
    "moe.route_scale": ("routed_scaling_factor",),
    "moe.n_groups": ("n_group",),
    "moe.topk_groups": ("topk_group",),
    "moe.aux_loss_coeff": ("router_aux_loss_coef", "aux_loss_alpha"),
    "moe.seq_aux_loss_coeff": ("aux_loss_alpha",),
    "moe.input_jitter": ("router_jitter_noise",),
}  # fmt: skip
"""By a field of a spec, what a config.json calls it."""
_FIELD = re.compile(r"\b(?:model|moe)\.\w+")


class HFConfig:
    """The values of one ``config.json``, with a family's defaults for those that it leaves out.

    A null is a value of its own that no default replaces; it reads as what a reader is given for
    it. Raises InputError, naming the file, for what is missing or not of its type.
    """

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.where, self.given = where, set(values)
        self.values = {key: value for key, value in values.items() if value is not None}

    @staticmethod
    def read(folder: Path) -> HFConfig:
        """The ``config.json`` of a folder."""
        path = folder / "config.json"
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise InputError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise InputError(f"{path} must be a table of values")
        return HFConfig(values, str(path))

    def with_defaults(self, defaults: dict[str, Any]) -> HFConfig:
        """The same with values for what is left out."""
        more = {key: value for key, value in defaults.items() if key not in self.given}
        return HFConfig({**more, **self.values}, self.where)

    def without(self, name: str) -> HFConfig:
        """The same without one value."""
        values = {key: value for key, value in self.values.items() if key != name}
        return HFConfig(values, self.where)

    def theirs(self, text: str) -> str:
        """An error about a spec, in the words of the config: ``moe.top_k`` is
        ``num_experts_per_tok``."""

        def name(match: re.Match[str]) -> str:
            found = [each for each in _NAMES.get(match[0], ()) if each in self.values]
            return found[0] if found else match[0]

        return _FIELD.sub(name, text)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 0."""
        value = self.values.get(name, default)
        if value is None:
            raise InputError(f"{self.where}: {name} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.wrong(name, "be a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        value = self.values.get(name, default)
        if value is None:
            raise InputError(f"{self.where}: {name} is missing")
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.wrong(name, "be a number")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, "be true or false")
        return value

    def must(self, name: str, *allowed: Any) -> None:
        """Refuse other values than these, of which the first is the default."""
        if self.values.get(name, allowed[0]) not in allowed:
            raise self.wrong(name, f"be {' or '.join(json.dumps(a) for a in allowed)}")

    def wrong(self, name: str, rule: str) -> InputError:
        """The error of a value that cannot be used."""
        value = json.dumps(self.values.get(name))
        return InputError(f"{self.where}: {name} ({value}) must {rule}")


def read_decoder(config: HFConfig) -> dict[str, Any]:
    """The ``[model]`` fields that all families have. Raises InputError for what Convoy has not."""
    config.must("hidden_act", "silu", "swish")
    for name in ("attention_bias", "mlp_bias", "use_sliding_window"):
        config.must(name, False)
    config.must("attention_dropout", 0)
    config.must("partial_rotary_factor", 1)
    if "quantization_config" in config.values:
        raise config.wrong("quantization_config", "be left out: convert the weights to bf16 first")
    longest = config.size("max_position_embeddings", 0)
    # Qwen names a window without using it.
    window = config.size("sliding_window", 0) if "use_sliding_window" not in config.values else 0
    if 0 < window < longest:
        raise config.wrong(
            "sliding_window", f"be null or at least max_position_embeddings ({longest})"
        )
    if set(config.values.get("layer_types", [])) - {"full_attention"}:
        raise config.wrong("layer_types", "be full_attention alone")
    heads = config.size("num_attention_heads")
    theta, yarn = _read_rope(config)
    fields = {
        "vocab_size": config.size("vocab_size"),
        "d_model": config.size("hidden_size"),
        "num_layers": config.size("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": config.size("num_key_value_heads", heads),
        "rope_theta": theta,
        "norm_eps": config.number("rms_norm_eps"),
        "tie_embeddings": config.flag("tie_word_embeddings"),
        "max_seq_len": longest,
    }
    return fields if yarn is None else {**fields, "yarn": yarn}


def head_dim(config: HFConfig) -> dict[str, Any]:
    """``head_dim`` where the config has one."""
    return {"head_dim": config.size("head_dim")} if "head_dim" in config.values else {}


def _read_rope(config: HFConfig) -> tuple[float, dict[str, Any] | None]:
    """rope_theta, and the ``[model.yarn]`` fields; from the new form or from rope_scaling."""
    name = "rope_parameters" if "rope_parameters" in config.values else "rope_scaling"
    values = config.values.get(name, {})
    if not isinstance(values, dict):
        raise config.wrong(name, "be a table")
    rope = HFConfig(values, f"{config.where}: {name}")
    theta = rope.number("rope_theta", config.number("rope_theta"))
    kind = "rope_type" if "rope_type" in rope.values else "type"
    rope.must(kind, "default", "yarn")
    known = {*_YARN, "rope_theta", "rope_type", "type", "attention_factor", "truncate"}
    rope.must("partial_rotary_factor", 1)
    unknown = sorted(set(rope.values) - known - {"partial_rotary_factor"})
    if unknown:
        raise rope.wrong(unknown[0], "be left out: it is not known")
    if rope.values.get(kind, "default") == "default":
        return theta, None
    rope.must("truncate", True)
    if "attention_factor" in rope.values:
        raise rope.wrong("attention_factor", "be left out: it follows from factor")
    yarn: dict[str, Any] = {
        ours: rope.number(name) for name, ours in _YARN.items() if name in rope.values
    }
    yarn["factor"] = rope.number("factor")
    yarn["original_seq_len"] = rope.size(
        "original_max_position_embeddings", config.size("max_position_embeddings")
    )
    return theta, yarn


def write_decoder(model: ModelConfig, seq_len: int) -> dict[str, Any]:
    """The inverse of :func:`read_decoder`; ``seq_len`` is for a model that names no longest."""
    longest, scaling = model.max_seq_len or seq_len, None
    if model.yarn is not None:
        yarn = model.yarn.model_dump()
        scaling = {name: yarn[ours] for name, ours in _YARN.items() if yarn[ours]}
        scaling |= {"rope_type": "yarn", "type": "yarn"}
        longest = model.max_seq_len or round(model.yarn.factor * model.yarn.original_seq_len)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": longest,
        # The older spelling, which older and newer readers take.
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        # The tokenizer, where it is known, gives the end token.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
