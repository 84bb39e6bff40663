"""The ``[tune]`` section of the spec."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Self

from pydantic import Field, model_validator

from pretrain.section import OnResume, Section


class LoraConfig(Section):
    """The ``[tune.lora]`` section: low-rank adapters learn in the place of weights."""

    on_resume = OnResume.FIXED

    rank: int = Field(default=8, ge=1)
    """The inner size of an adapter's two matrices."""
    alpha: float = Field(default=16.0, gt=0)
    """An adapter's product is multiplied by alpha / rank."""
    on: list[str] = Field(default=["experts", "attention"], min_length=1)
    """What gets adapters: ``experts``, ``router``, ``attention``, ``dense``, which are the dense
    and the shared feed-forward layers, or patterns of the names of modules."""


class TuneConfig(Section):
    """The ``[tune]`` section: only some parameters learn. Without this table all do.

    A run with this table begins from ``init.checkpoint``, or what is frozen has random values.
    """

    on_resume = OnResume.FIXED

    learn: list[str] = Field(default_factory=list)
    """The parameters of the model that learn, by patterns of their names, such as
    ``layers.*.moe.router.*``; docs/tuning.md has the names."""
    lora: LoraConfig | None = None
    """Adapters; without this table there are none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.learn and self.lora is None:
            raise ValueError("tune must have learn or a table [tune.lora]: nothing would learn")
        return self

    def learns(self, name: str) -> bool:
        """Whether a parameter of the model learns as it is."""
        return any(fnmatchcase(name, pattern) for pattern in self.learn)
