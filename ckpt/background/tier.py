"""Checkpoint tiers: host memory, a peer's memory, the local disk, shared storage."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from ckpt.lifecycle import Retention

TierName = Literal["memory", "peer", "local", "shared"]
TIERS: tuple[TierName, ...] = ("memory", "peer", "local", "shared")
"""From the fastest to the safest."""


class Message(BaseModel):
    """What the trainer and its writer process send each other: frozen, of known fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Tier(Message):
    """One place that checkpoints are written to."""

    name: TierName
    location: str
    """A folder, or whatever else ``open_store`` takes."""
    ranks: tuple[int, ...] | None = None
    """The ranks that write there: those of a node, or all of them where it is None."""
    keep: int | Retention = 2
    """What stays there; a number is of the newest."""
    volatile: bool = False
    """Removed when the run ends: it is memory."""

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks that write there, as far as they are told apart; the first one commits."""
        return (0,) if self.ranks is None else self.ranks
