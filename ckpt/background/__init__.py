"""Saving while training goes on: the trainer's side and the writer process."""

from typing import TYPE_CHECKING, Any

from ckpt.background.messages import SaveEvent
from ckpt.background.tier import TIERS, Tier, TierName

if TYPE_CHECKING:
    from ckpt.background.checkpointer import AsyncCheckpointer

__all__ = [
    "TIERS",
    "AsyncCheckpointer",
    "SaveEvent",
    "Tier",
    "TierName",
]

_WITH_TORCH = {"AsyncCheckpointer": "ckpt.background.checkpointer"}


if not TYPE_CHECKING:  # mypy would otherwise take any name for one of this module

    def __getattr__(name: str) -> Any:
        # On demand: only this name needs torch, whose import takes seconds.
        if name not in _WITH_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        value = getattr(import_module(_WITH_TORCH[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
