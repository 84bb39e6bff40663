"""Opening the store at a location."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from ckpt.store.local import LocalStore
from ckpt.store.object_store import SCHEMES, open_location
from ckpt.store.protocol import Store
from ckpt.store.retrying import Retrying

Location = Store | Path | str
"""A store, or its place: a folder, ``s3://BUCKET/PREFIX`` (``gs://``, ``az://``), ``peer://``, or
the URL of a store from outside, see :func:`open_store`."""

STORES = "convoy.stores"
"""The group of entry points that name stores from outside: a URL's scheme, and the class."""
_ATTEMPTS = 8
"""At one operation of a store that is not a folder: about ten seconds."""
_CLASS = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")
_METHODS = sorted(n for n, member in vars(Store).items() if callable(member) and n[0] != "_")


def open_store(location: Location) -> Store:
    """The store at a location.

    ``package.module:Class://REST`` is a store from outside: ``Class`` is called with the whole URL,
    and returns a :class:`ckpt.Store`. ``SCHEME://REST`` is one too, where an installed package has
    an entry point ``SCHEME = "package.module:Class"`` in the group ``convoy.stores``.
    ``ckpt.testing.StoreContract`` has the tests that such a store must pass. Operations of an
    object store, and of a store from outside, are repeated by :class:`ckpt.Retrying`.

    Args:
        location: a store, or its place.

    Raises ValueError for the URL of no store, and where the package for the store is missing.
    """
    if not isinstance(location, str | Path):
        return location
    if isinstance(location, Path) or "://" not in location:
        if re.match(r"(\w{2,}|[\w.]+:\w+):/", str(location)):
            raise ValueError(
                f"checkpoint location {location} is a URL: give it as a str, not a path"
            )
        return LocalStore(Path(location))
    scheme = location.partition("://")[0]
    if scheme == "peer":
        from ckpt.store.peer import PeerStore

        return PeerStore(location)
    kind = None if scheme in SCHEMES else _kind(location, scheme)
    store = open_location(location) if kind is None else _made(location, kind)
    return Retrying(store, _ATTEMPTS)


def as_location(text: str) -> Path | str:
    """The location in a command line or a spec: a URL, or a folder.

    Raises ValueError for the URL of no store.
    """
    if "://" in text:
        open_store(text)
        return text
    return Path(text)


def _kind(location: str, scheme: str) -> Callable[[str], Any] | None:
    """What makes the stores of a scheme; None where nobody has it."""
    named = _CLASS.fullmatch(scheme)
    try:
        if named is not None:
            return getattr(import_module(named[1]), named[2])  # type: ignore[no-any-return]
        for entry_point in entry_points(group=STORES, name=scheme):
            return entry_point.load()  # type: ignore[no-any-return]
    except (ImportError, AttributeError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"checkpoint location {location} must begin with package.module:Class of an importable "
            f"class: {why}"
        ) from None
    return None


def _made(location: str, kind: Callable[[str], Any]) -> Store:
    # Nothing but a class of stores is called: a location may come from a file of somebody else.
    name = f"{getattr(kind, '__module__', '')}:{getattr(kind, '__qualname__', kind)}"
    missing = [member for member in _METHODS if not hasattr(kind, member)]
    if missing or not isinstance(kind, type):
        raise ValueError(
            f"checkpoint location {location}: {name} must be a class with the methods of "
            f"ckpt.Store, and lacks {', '.join(missing) or 'being a class'}"
        )
    try:
        store: Store = kind(location)
    except TypeError as error:
        why = str(error).splitlines()[0]
        raise ValueError(
            f"checkpoint location {location}: {name} must take the URL alone: {why}"
        ) from None
    if not hasattr(store, "links"):
        raise ValueError(
            f"checkpoint location {location}: {name} must have links: whether a file can have two "
            f"names"
        )
    return store
