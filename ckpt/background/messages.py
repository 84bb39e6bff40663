"""The messages between a trainer and its writer process: JSON, one object a message."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Literal

from pydantic import BaseModel

from ckpt.background.tier import Tier, TierName
from ckpt.format import ArrayRecord, Record
from ckpt.write import SaveInfo


class Hello(Record):
    """The first message to a writer process: its rank, its tiers and its limits."""

    rank: int
    tiers: list[Tier]
    lock: str
    """The file that names the one writer process of this rank on this machine."""
    serves: str | None = None
    """A folder in memory that this writer process serves to the writer processes of other nodes."""
    key: str = ""
    """The secret that a client of the served folder must know."""
    port: int = 0
    """The port to serve the folder at; 0 for any free one."""
    memory_retention_seconds: float
    """How long volatile tiers are kept after the trainer died."""
    commit_timeout_seconds: float
    """How long a commit waits for the writer processes of other ranks."""


class StagedObject(Record):
    """One object of a save, laid out in the staging memory."""

    array: int
    """The index of its array in :attr:`SaveRequest.arrays`."""
    coordinates: tuple[int, ...]
    """Its place in the array's grid of objects."""
    offset: int
    """Where it begins in the staging memory, in bytes."""
    tiers: list[TierName]
    """The tiers that this rank writes it to."""


class SaveRequest(Record):
    """Write what is staged to some tiers."""

    info: SaveInfo
    """What the manifest says besides the arrays, but for its ranks: a tier has its own."""
    tiers: list[TierName]
    arrays: list[ArrayRecord]
    objects: list[StagedObject]
    staged_bytes: int

    def info_in(self, tier: Tier) -> SaveInfo:
        """What the manifest in a tier says besides the arrays."""
        return replace(self.info, ranks=tier.ranks)


class Shutdown(Record):
    """Finish the saves that were requested, and end."""

    remove_volatile: bool
    """Remove the volatile tiers now."""


class Request(Record):
    """A message of the trainer; one of the fields is set."""

    hello: Hello | None = None
    add_tier: Tier | None = None
    save: SaveRequest | None = None
    shutdown: Shutdown | None = None


class SaveEvent(Record):
    """A message of the writer process, about one save in one tier.

    ``ready`` and ``free`` are about no tier. ``ready``: the writer process has started. ``free``:
    every tier has read the staging memory, and the next save may fill it. ``written``: this rank's
    objects are durable, and another rank commits. ``committed``: this rank published the manifest.
    ``failed``: the save is not in this tier.
    """

    what: Literal["ready", "free", "written", "committed", "failed"]
    tier: TierName | None = None
    step: int = -1
    port: int = 0
    """With ``ready``: the port at which the writer process serves its folder; 0 for none."""
    error: str = ""
    """With ``failed``: the reason, in one line."""
    told: bool = False
    """With ``failed``: the rank that commits the save gives this reason too."""
    seconds: float = 0.0
    """From the request until this event."""
    write_seconds: float = 0.0
    """From the request until this rank's objects were durable."""
    retries: int = 0
    """How many attempts of this rank at store operations were repeated."""
    bytes_written: int = 0
    """By this rank."""
    bytes_linked: int = 0
    """By this rank: bytes of unchanged objects, hard-linked to the checkpoint before."""


@dataclass
class Channel:
    """One end of the connection between a trainer and its writer process."""

    connection: Connection[Any, Any]

    def send(self, message: BaseModel) -> None:
        """Send one message. Raises OSError where the other process is gone."""
        self.connection.send_bytes(message.model_dump_json().encode())

    def receive(self, timeout_seconds: float | None) -> bytes | None:
        """The next message; None where no message came in time. Raises EOFError where the other
        process is gone."""
        if not self.connection.poll(timeout_seconds):
            return None
        try:
            return self.connection.recv_bytes()
        except OSError:
            raise EOFError from None

    def close(self) -> None:
        """Close this end."""
        with contextlib.suppress(OSError):
            self.connection.close()
