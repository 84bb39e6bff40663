"""Saving while training goes on: the trainer's side and the writer process."""

from typing import TYPE_CHECKING

from ckpt.background.claim import owned
from ckpt.background.messages import SaveEvent
from ckpt.background.tier import TIERS, Tier, TierName
from parallel.on_demand import on_demand

if TYPE_CHECKING:
    from ckpt.background.checkpointer import AsyncCheckpointer

__all__ = [
    "TIERS",
    "AsyncCheckpointer",
    "SaveEvent",
    "Tier",
    "TierName",
    "owned",
]


if not TYPE_CHECKING:  # mypy would otherwise take any name for one of this module
    # On demand: only this name needs torch, whose import takes seconds.
    __getattr__ = on_demand(__name__, {"AsyncCheckpointer": "ckpt.background.checkpointer"})


def __dir__() -> list[str]:
    return __all__
