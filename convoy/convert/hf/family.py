"""A Hugging Face model family: a declaration, and what it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from convoy.convert.hf.expressed import ANYWHERE, FREE, IMPLIED, Expressed, fields_of_specs, neutral
from convoy.convert.hf.fields import Line
from convoy.convert.hf.model_config import HFConfig
from convoy.convert.hf.tensors import In
from moe import MoEConfig
from pretrain.errors import InputError
from pretrain.model import ModelConfig

Sections = tuple[dict[str, Any], dict[str, Any] | None]
"""``[model]`` and, where there is one, ``[moe]``."""


@dataclass(frozen=True)
class Family:
    """One ``model_type``: how its config.json and a spec say the same.

    A field of a spec of which no line speaks must say nothing: a decoder with a feature that the
    family has not is refused, whatever features are added.
    """

    model_type: str
    name: str
    """For people."""
    architecture: str
    lines: tuple[Line, ...]
    tensors: Mapping[str, str | In] = field(default_factory=dict)
    """Tensors that are not called as in the others, by the parameter's name within a layer."""
    ignored: str | None = None
    """A pattern of the names of tensors of modules that neither transformers nor Convoy has."""
    only: str = ""
    """What a config.json must say to be converted, for people; empty where the family has nothing
    that Convoy lacks."""

    @cached_property
    def names(self) -> dict[str, tuple[str, ...]]:
        """By a field of a spec of which the family speaks, what a config.json may call it."""
        names: dict[str, tuple[str, ...]] = {"moe.d_model": ("hidden_size",)}
        for line in self.lines:
            for ours, theirs in line.names.items():
                names[ours] = names.get(ours, ()) + theirs
        return names

    @property
    def sparse(self) -> bool:
        """Whether the family has experts."""
        return "moe.top_k" in self.names

    @property
    def defaults(self) -> dict[str, Any]:
        """What the family takes for values that a config.json leaves out."""
        defaults: dict[str, Any] = {}
        for line in self.lines:
            defaults |= line.defaults
        return defaults

    def sections(self, config: HFConfig) -> Sections:
        """``[model]`` and ``[moe]`` of a config. Raises InputError where they cannot be."""
        sections: dict[str, dict[str, Any]] = {"model": {}, "moe": {}}
        for line in self.lines:
            for name, value in line.read(config).items():
                section, field_name = name.split(".")
                sections[section][field_name] = value
        return sections["model"], sections["moe"] if self.sparse else None

    def config(self, model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> dict[str, Any]:
        """config.json. Raises InputError for the first value that the family cannot express."""
        decoder = Expressed(model, moe, seq_len, self.model_type)
        decoder.must("moe", self.sparse)
        needs = dict(ANYWHERE) if self.sparse else {}
        for line in self.lines:
            needs |= line.needs()
        for name in fields_of_specs(self.sparse):
            if name not in {*self.names, *needs, *FREE, *IMPLIED}:
                needs[name] = (neutral(name),)
        # These say more than fields that follow from them.
        first = [name for name in ("model.num_mtp_layers", "model.latent") if name in needs]
        for name in dict.fromkeys([*first, *needs]):
            decoder.must(name, *needs[name])
        values: dict[str, Any] = {
            "model_type": self.model_type,
            "architectures": [self.architecture],
        }
        for line in self.lines:
            values |= line.write(decoder)
        return values

    def refusal(self, model: ModelConfig, moe: MoEConfig | None, seq_len: int) -> InputError | None:
        """Why the family cannot express a decoder; None where it can."""
        try:
            self.config(model, moe, seq_len)
        except InputError as error:
            return error
        return None
