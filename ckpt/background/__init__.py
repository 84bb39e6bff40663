"""Saving while training goes on: the trainer's side and the writer process."""

from typing import TYPE_CHECKING, Any

from ckpt.background.messages import Event
from ckpt.background.tier import TIERS, Tier, TierName

if TYPE_CHECKING:
    from ckpt.background.saver import Saver

__all__ = [
    "TIERS",
    "Event",
    "Saver",
    "Tier",
    "TierName",
]

_WITH_TORCH = {"Saver": "ckpt.background.saver"}


def __getattr__(name: str) -> Any:
    # On demand: the other names need neither torch nor the seconds of its import.
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_WITH_TORCH[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
