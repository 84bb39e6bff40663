"""Events about what a run is trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pretrain.observe.event import Event


@dataclass(frozen=True, kw_only=True)
class DataOpened(Event):
    """What the samples of this start are drawn from; sample n is a function of these fields and of
    n alone."""

    name: ClassVar[str] = "data"
    sample: int
    """The next sample."""
    seed: int
    seq_len: int
    sources: dict[str, dict[str, Any]]
    """By fingerprint: ``name``, ``path``, ``sequences`` and ``tokens`` of each source."""
    blend: list[dict[str, Any]]
    """The phases of the blend in order: ``from_sample``, and ``weights`` by fingerprint."""
