"""The contract of a rewrite's target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ckpt.errors import CheckpointError

Progress = Callable[[int], None]
"""Called with the count of bytes that have been written since the last call."""
Receipt = dict[str, Any]
"""What is known of a part that is durable, as JSON."""


class Part(NamedTuple):
    """A piece of work: one object or file."""

    key: str
    nbytes: int


class Target(Protocol):
    """What is written. It is pickled to reach other processes."""

    def begin(self) -> dict[str, Receipt]:
        """Make ready, alone; returns the receipts of the parts that an earlier call wrote.

        Raises CheckpointError where the target is there already, or somebody is writing it.
        """
        ...

    def parts(self) -> Sequence[Part]:
        """Every part, in the order in which they are best written."""
        ...

    def check(self, key: str, receipt: Receipt) -> bool:
        """Read a part; whether it is what the receipt says."""
        ...

    def write(self, key: str, slab_bytes: int, progress: Progress) -> Receipt:
        """Write a part, in the place of what an earlier call may have left of it, and make it
        durable. At most a few times ``slab_bytes`` are in memory."""
        ...

    def journal(self, receipts: dict[str, Receipt]) -> None:
        """Add receipts to the journal, durably."""
        ...

    def commit(self, receipts: dict[str, Receipt]) -> None:
        """All parts are durable: make them a whole that others see."""
        ...

    def discard(self) -> None:
        """Remove what was written."""
        ...

    def end(self) -> None:
        """Let others begin."""
        ...


class UnfinishedError(CheckpointError):
    """What is durable is kept: the same call goes on from there."""
