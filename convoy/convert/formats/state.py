"""What a checkpoint says of its training besides arrays, in words that all formats share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Training:
    """Counters, the optimizer's settings, and where the learning-rate schedule is."""

    step: int = 0
    """Optimizer steps of the run."""
    updates: int | None = None
    """Updates that the moments have seen, Adam's ``step``; None without moments."""
    tokens: int | None = None
    """Tokens that the run has trained on, where the checkpoint says."""
    samples: int | None = None
    """Sequences that the run has trained on, where the checkpoint says."""
    position: int | None = None
    """Steps that the learning-rate schedule has made."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """The shape of the schedule, where the checkpoint has it: ``max_lr``, ``min_lr``,
    ``warmup_steps``, ``decay_steps``, ``style``."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """``lr``, ``initial_lr``, ``betas``, ``eps``, of all parameters."""
    decay: dict[str, float] = field(default_factory=dict)
    """Weight decay by the path of an array, such as ``embed/weight``."""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Training:
        """The inverse; what is not known is left out."""
        names = {known.name for known in fields(Training)}
        known = {key: value for key, value in values.items() if key in names}
        optimizer = dict(known.get("optimizer") or {})
        if "betas" in optimizer:
            optimizer["betas"] = [float(beta) for beta in optimizer["betas"]]
        return Training(**{**known, "optimizer": optimizer})

    def filled(self, other: Training) -> Training:
        """With what another state of the same step says, where this one does not."""
        if other.step != self.step:
            return self
        values: dict[str, Any] = {}
        for name in ("updates", "tokens", "samples", "position"):
            own = getattr(self, name)
            values[name] = getattr(other, name) if own is None else own
        for name in ("schedule", "optimizer", "decay"):
            values[name] = {**getattr(other, name), **getattr(self, name)}
        return replace(self, **values)


OPTIMIZER_WORDS = ("lr", "initial_lr", "betas", "eps")


def common(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that all groups of parameters share."""
    groups = list(values)
    shared = {}
    for word in OPTIMIZER_WORDS:
        said = [group[word] for group in groups if word in group]
        if said and all(value == said[0] for value in said):
            shared[word] = list(said[0]) if isinstance(said[0], tuple) else said[0]
    return shared
