"""Opening the store at a location."""

from __future__ import annotations

import re
from pathlib import Path

from ckpt.store.local import LocalStore
from ckpt.store.protocol import Store

Location = Store | Path | str
"""A store, or its place: a folder, ``s3://BUCKET/PREFIX`` (``gs://``, ``az://``), or ``peer://``."""


def open_store(location: Location, *, retries: bool = True) -> Store:
    """The store at a location.

    Args:
        location: a store, or its place.
        retries: let the client of an object store repeat failed requests without a word. A caller
            that repeats them itself, and tells of them, gives False.

    Raises ValueError for the URL of no store, and where the package for the store is missing.
    """
    if isinstance(location, str) and location.startswith("peer://"):
        from ckpt.store.peer import PeerStore

        return PeerStore(location)
    if isinstance(location, str) and "://" in location:
        from ckpt.store.object_store import open_location  # needs obstore, an optional package

        return open_location(location, retries=retries)
    if isinstance(location, str | Path):
        if re.match(r"\w{2,}:/", str(location)):
            raise ValueError(
                f"checkpoint location {location} is a URL: give it as a str, not a path"
            )
        return LocalStore(Path(location))
    return location


def as_location(text: str) -> Path | str:
    """The location in a command line or a spec: a URL, or a folder.

    Raises ValueError for the URL of no store.
    """
    if "://" in text:
        open_store(text)
        return text
    return Path(text)
