"""Checkpoint tiers: host memory, a peer's memory, the local disk, shared storage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ckpt.format import Record
from ckpt.lifecycle import Retention

TierName = Literal["memory", "peer", "local", "shared"]
"""The tiers from the fastest to the safest."""


class Tier(Record):
    """One place that checkpoints are written to."""

    name: TierName
    location: str
    """A folder, or another location that ``ckpt.open_store`` takes."""
    ranks: tuple[int, ...] | None = None
    """The ranks that write to this tier: those of one node; None for all ranks."""
    keep: Annotated[int, Field(ge=1)] | Retention | None = 2
    """The checkpoints that stay in this tier: a number keeps that many of the newest, None all."""
    volatile: bool = False
    """Whether the tier is in memory, and is removed when the run ends."""

    @property
    def committer(self) -> int:
        """The rank that commits in this tier: the first one that writes there."""
        return 0 if self.ranks is None else self.ranks[0]
