"""The contract of a rewrite's target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from ckpt.errors import CheckpointError

Progress = Callable[[int], None]
"""Called with the count of bytes that have been written since the last call."""
Receipt = dict[str, Any]
"""What a target says of a durable part, as JSON."""


class Part(NamedTuple):
    """A piece of work: one object or file."""

    key: str
    nbytes: int


class Target(Protocol):
    """A checkpoint or folder that is being written, pickled to reach other processes."""

    def begin(self) -> dict[str, Receipt] | None:
        """Prepare the target, in the first process only; returns the receipts of the parts that an
        earlier call wrote, or None where an earlier call has committed this very rewrite: the same
        source, layout and options.

        Raises CheckpointError where anything else is there already, where what an earlier call
        committed is damaged, or where another process writes there.
        """
        ...

    def parts(self) -> Sequence[Part]:
        """Every part, in the order in which they are best written."""
        ...

    def room(self) -> tuple[str, int | None]:
        """Where the parts are written, and the free bytes there; None where unknown, or where parts
        may be shorter than their arrays."""
        ...

    def check(self, key: str, receipt: Receipt) -> bool:
        """Read a part, and say whether the part is what the receipt says."""
        ...

    def write(self, key: str, slab_bytes: int, progress: Progress) -> Receipt:
        """Write a part and make the part durable. What an earlier call may have left of the part is
        replaced. At most a few times ``slab_bytes`` are in memory."""
        ...

    def journal(self, receipts: dict[str, Receipt]) -> None:
        """Add receipts to the journal, durably."""
        ...

    def commit(self, receipts: dict[str, Receipt]) -> None:
        """Make the target visible to others, now that all parts are durable."""
        ...

    def discard(self) -> None:
        """Remove what was written."""
        ...

    def end(self) -> None:
        """Release the target's lock."""
        ...


class UnfinishedError(CheckpointError):
    """A rewrite that stopped. Durable parts are kept: the same call goes on from there."""
