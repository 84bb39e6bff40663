"""A decoder as model families see it: the values of its spec that its numbers depend on."""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple

from pydantic import BaseModel

from moe import MoEConfig
from pretrain.errors import InputError
from pretrain.model import ModelConfig

FREE = frozenset({
    "model.max_seq_len", "moe.d_model", "moe.routing", "moe.capacity", "moe.input_jitter",
    "moe.balancing", "moe.bias_update_rate", "moe.aux_loss_coeff", "moe.aux_loss_scope",
    "moe.seq_aux_loss_coeff", "moe.z_loss_coeff", "moe.backend", "moe.gemm",
    "moe.recompute_experts", "moe.dispatcher", "moe.dispatch_dtype", "moe.overlap_chunks",
    "moe.max_tokens_per_call",
})  # fmt: skip
"""Fields that a family need not speak of: they are about training or about how numbers are
computed, or :data:`ANYWHERE` has what they must be."""
_LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "v_head_dim")
IMPLIED = frozenset({"model.head_dim", *(f"model.{name}" for name in _LATENT)})
"""Fields that follow from ``model.latent`` or from sizes, where a family does not speak of them."""
ANYWHERE: dict[str, tuple[Any, ...]] = {
    "moe.capacity.policy": ("dropless",),
    "moe.capacity.max_tokens_per_rank": (0,),
    "moe.routing": ("top_k",),  # or another one that is the plain choice in evaluation
}
"""What the experts of every family must have, by name."""
_NEUTRAL: dict[str, Any] = {
    "model.qk_norm": "none", "model.d_ff": 0, "moe.norm_topk_prob": False,
    "moe.topk_per_group": None,
}  # fmt: skip
"""What a field is where a family has nothing of the kind; for other fields their default."""


class Expressed(NamedTuple):
    """A decoder that is to be expressed as a model of a family."""

    model: ModelConfig
    moe: MoEConfig | None
    seq_len: int
    """Tokens of a sequence of its training."""
    model_type: str
    """The family, for errors."""

    def value(self, name: str) -> Any:
        """A field by ``section.field``, as far as numbers depend on it, or a name that follows from
        fields: ``moe``, whether there are experts, and ``model.latent``."""
        if name == "moe":
            return self.moe is not None
        section, field = name.split(".", 1)
        if section == "model":
            return self._of_model(field)
        moe = self.moe
        assert moe is not None, "moe is asked for first"
        if field == "routing" and moe.routing_traits.top_k_in_evaluation:
            return "top_k"
        if field == "norm_topk_prob":  # a softmax over the chosen logits is one over all, normed
            return moe.norm_topk_prob or moe.softmax_after_topk
        if field == "softmax_after_topk":
            return False  # norm_topk_prob says it
        if field == "topk_per_group" and moe.n_groups == 1:
            return None  # there is nothing to choose
        return attrgetter(field)(moe)

    def _of_model(self, field: str) -> Any:
        model = self.model
        if field == "d_ff" and self.moe is not None and not model.first_k_dense:
            return 0  # no layer is dense
        if field == "qk_rope_head_dim" and not model.latent:
            rotary = model.qk_rope_head_dim
            return 0 if rotary == model.qk_head_dim else rotary
        return getattr(model, field)

    def must(self, name: str, *allowed: Any) -> None:
        """Raises InputError where a field has none of the values that can be expressed."""
        value = self.value(name)
        if value not in allowed:
            rule = " or ".join(_toml(a) for a in allowed if a is not None)
            raise self.wrong(name, f"be {rule}")

    def wrong(self, name: str, rule: str) -> InputError:
        """The error of a field that the family cannot express."""
        value = _toml(self.value(name))
        return InputError(f"{name} ({value}) must {rule} to be a {self.model_type} model")


def neutral(name: str) -> Any:
    """The value of a field that says nothing."""
    section, field = name.split(".", 1)
    config = ModelConfig if section == "model" else MoEConfig
    return _NEUTRAL.get(name, config.model_fields[field].get_default(call_default_factory=True))


def fields_of_specs(sparse: bool) -> list[str]:
    """Every field of ``[model]`` and, where there are experts, ``[moe]``, as ``section.field``."""
    names = [f"model.{field}" for field in ModelConfig.model_fields]
    return names + ([f"moe.{field}" for field in MoEConfig.model_fields] if sparse else [])


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "a table" if isinstance(value, BaseModel) else str(value)
