"""From where a store is to the store."""

from __future__ import annotations

from pathlib import Path

from ckpt.store import LocalStore, Store

Location = Store | Path | str
"""A store, or where one is: a folder, or what has a scheme, as ``peer://...``."""


def open_store(location: Location) -> Store:
    """The store at a location."""
    if isinstance(location, str) and location.startswith("peer://"):
        from ckpt.peer import PeerStore

        return PeerStore(location)
    if isinstance(location, str | Path):
        return LocalStore(Path(location))
    return location
