"""Rotary positions in a config.json: the base, YaRN, and the part of a head that is rotated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from convoy.convert.hf.expressed import Expressed
from convoy.convert.hf.fields import Line, Names, Values
from convoy.convert.hf.model_config import HFConfig
from pretrain.model import ModelConfig

_YARN = {
    "factor": "factor",
    "original_max_position_embeddings": "original_seq_len",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_FACTOR = "partial_rotary_factor"


@dataclass(frozen=True)
class Rope(Line):
    """``rope_parameters``, or the older ``rope_theta`` and ``rope_scaling``, which are written:
    older and newer readers take them."""

    theta: float = 10000.0
    """Of a config.json that names none."""
    partial: float | None = None
    """The part of a head that is rotated where a config.json names none; None in a family whose
    heads are rotated whole."""
    size: str | None = None
    """A name for the rotated numbers of a head, which is read too."""
    by_layer_type: bool = False
    """``rope_parameters`` has a table for each type of layers, and no older form."""

    @property
    def names(self) -> Names:
        named = {"model.rope_theta": ("rope_theta",), "model.yarn": ()}
        return named if self.partial is None else {**named, "model.qk_rope_head_dim": (_FACTOR,)}

    @property
    def defaults(self) -> Values:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.theta}
        if self.partial not in (None, 1.0):
            rope[_FACTOR] = self.partial
        return {"rope_parameters": {"full_attention": rope} if self.by_layer_type else rope}

    def read(self, config: HFConfig) -> Values:
        rope = self._table(config)
        theta = rope.number("rope_theta", config.number("rope_theta", self.theta))
        kind = "rope_type" if "rope_type" in rope.values else "type"
        rope.must(kind, "default", "yarn")
        known = {*_YARN, "rope_theta", "rope_type", "type", "attention_factor", "truncate", _FACTOR}
        unknown = sorted(set(rope.values) - known)
        if unknown:
            raise rope.wrong(unknown[0], "be left out: it is not known")
        fields = {"model.rope_theta": theta, **self._part(config, rope)}
        if rope.values.get(kind, "default") == "yarn":
            fields["model.yarn"] = _yarn(config, rope)
        return fields

    def _table(self, config: HFConfig) -> HFConfig:
        name = "rope_parameters" if "rope_parameters" in config.values else "rope_scaling"
        values = config.values.get(name, {})
        if self.by_layer_type and isinstance(values, dict):
            values = values.get("full_attention", {})
            name = f"{name}: full_attention"
        if not isinstance(values, dict):
            raise config.wrong(name.partition(":")[0], "be a table")
        return HFConfig(values, f"{config.where}: {name}")

    def _part(self, config: HFConfig, rope: HFConfig) -> Values:
        if self.partial is None:
            rope.must(_FACTOR, 1)
            config.must(_FACTOR, 1)
            return {}
        heads = config.size("num_attention_heads")
        head = config.size("head_dim", config.size("hidden_size") // max(heads, 1))
        factor = rope.number(_FACTOR, config.number(_FACTOR, self.partial))
        rotary = int(head * factor)
        if self.size is not None and not {_FACTOR} & {*rope.values, *config.values}:
            rotary = config.size(self.size, rotary)
        return {"model.qk_rope_head_dim": 0 if rotary == head else rotary}

    def write(self, decoder: Expressed) -> Values:
        model = decoder.model
        scaling = None
        if model.yarn is not None:
            yarn = model.yarn.model_dump()
            scaling = {name: yarn[ours] for name, ours in _YARN.items() if yarn[ours]}
            scaling |= {"rope_type": "yarn", "type": "yarn"}
        if self.by_layer_type:
            rope = {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta}
            rope.pop("type", None)
            return {"rope_parameters": {"full_attention": rope}}
        values: Values = {"rope_theta": model.rope_theta, "rope_scaling": scaling}
        if self.partial is not None:
            values[_FACTOR] = _factor(model)
        if self.size is not None:
            values[self.size] = model.qk_rope_head_dim or model.qk_head_dim
        return values


def _factor(model: ModelConfig) -> float:
    """The part of a head that is rotated, such that its product with the size of a head is not
    rounded below the whole number that it is."""
    head = model.qk_head_dim
    rotary = model.qk_rope_head_dim or head
    factor = rotary / head
    return factor if int(head * factor) == rotary else math.nextafter(factor, 1.0)


def _yarn(config: HFConfig, rope: HFConfig) -> Values:
    rope.must("truncate", True)
    if "attention_factor" in rope.values:
        raise rope.wrong("attention_factor", "be left out: it follows from factor")
    yarn: Values = {ours: rope.number(name) for name, ours in _YARN.items() if name in rope.values}
    yarn["factor"] = rope.number("factor")
    yarn["original_seq_len"] = rope.size(
        "original_max_position_embeddings", config.size("max_position_embeddings")
    )
    return yarn
