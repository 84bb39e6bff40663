"""What a trainer and its keeper say to each other: JSON, one object a message."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from pydantic import BaseModel

from ckpt.background.tier import Message, Tier, TierName
from ckpt.format import ArrayRecord, Compression
from ckpt.write import SaveInfo
from parallel.layout import Topology


class Setup(Message):
    """The first message to a keeper."""

    serves: str | None = None
    """A folder in memory that this keeper serves to other nodes' keepers."""
    key: str = ""
    """What those must know."""
    port: int = 0
    """What it is served at; 0 for any that is free."""

    rank: int
    tiers: list[Tier]
    lock: str
    """A file that says which keeper is this rank's."""
    linger_seconds: float
    """How long volatile tiers are kept for a trainer that died."""
    commit_timeout_seconds: float
    """How long a commit waits for the other ranks' keepers."""


class StagedObject(Message):
    """One object of a save, laid out in the staging memory."""

    array: int
    coordinates: tuple[int, ...]
    offset: int
    tiers: list[TierName]
    """Where this rank writes it."""


class Order(Message):
    """Write what is staged."""

    save_id: str
    step: int
    topology: dict[str, int]
    state: dict[str, Any]
    spec: dict[str, Any]
    spec_hash: str
    compression: Compression
    tiers: list[TierName]
    arrays: list[ArrayRecord]
    objects: list[StagedObject]
    staged_bytes: int

    def info(self, tier: Tier) -> SaveInfo:
        """What the manifest in a tier says besides the arrays."""
        return SaveInfo(
            save_id=self.save_id,
            step=self.step,
            topology=Topology(**self.topology),
            state=self.state,
            spec=self.spec,
            spec_hash=self.spec_hash,
            ranks=tier.ranks,
            compression=self.compression,
        )


class Close(Message):
    """Finish what was ordered, and end."""

    forget: bool
    """Remove volatile tiers now."""


class Request(Message):
    """Everything that a trainer sends: one of these."""

    setup: Setup | None = None
    tier: Tier | None = None
    """One more."""
    order: Order | None = None
    close: Close | None = None


class Event(Message):
    """What a keeper tells of one save in one tier; of no tier, that its memory is free again."""

    what: Literal["ready", "free", "written", "committed", "failed"]
    tier: TierName | None = None
    step: int = -1
    port: int = 0
    """Of what this keeper serves; with ``ready``."""
    error: str = ""
    seconds: float = 0.0
    """From the order on."""
    write_seconds: float = 0.0
    """Of them, until this rank's part was durable."""
    retries: int = 0
    """Operations of this rank that were tried again, each as often as it was."""
    bytes_written: int = 0
    """By this rank."""
    bytes_linked: int = 0
    """That were there already, in the checkpoint before."""


@dataclass
class Channel:
    """One end of a trainer's line to its keeper."""

    connection: Connection[Any, Any]

    def send(self, message: BaseModel) -> None:
        """Raises OSError where there is nobody at the other end."""
        self.connection.send_bytes(message.model_dump_json().encode())

    def receive(self, timeout_seconds: float | None) -> bytes | None:
        """The next message; None where there is none in time. Raises EOFError at the end."""
        if not self.connection.poll(timeout_seconds):
            return None
        try:
            return self.connection.recv_bytes()
        except OSError:
            raise EOFError from None

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self.connection.close()
