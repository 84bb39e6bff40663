"""The contract of a store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

ReportBytes = Callable[[int], None]
"""A progress callback: called with the bytes of each finished object, from several threads."""

THREADS = min(4, os.cpu_count() or 1)
"""The number of objects that a rank reads at a time."""

Bytes: TypeAlias = "NDArray[np.uint8]"


class TakenByAnotherError(FileExistsError):
    """A key is taken, and not by an earlier attempt of this store whose answer was lost."""


class Reader(Protocol):
    """An open object."""

    size: int
    """The object's length in bytes."""

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        """Fill ``parts``, one after the other, with the object's bytes from ``start`` on.

        Raises OSError where the object ends before, or cannot be read.
        """

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        """Announce the reads to come: pairs of start and stop, in about the order of the reads.

        A remote store then fetches the bytes in few requests; another one does nothing. Raises
        OSError where the object cannot be read.
        """
        del spans


@runtime_checkable
class Store(Protocol):
    """Immutable objects under keys such as ``objects/SAVE_ID/zarr.json``.

    All errors are OSErrors. A class that derives from this one may leave out what it cannot do:
    ``sync``, ``link`` and ``free_bytes``.
    """

    links: bool
    """Whether :meth:`link` spares a copy, and reads are cheap enough to compare the bytes first."""

    def where(self, key: str = "") -> str:
        """The path or URL of an object or of the store, for messages."""

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        """Write an object of ``parts``, in order. The bytes are durable when this returns; the name
        is durable after :meth:`sync`.

        Raises FileExistsError where the key is taken, even by an incomplete object.
        """

    def sync(self, keys: Iterable[str]) -> None:
        """Make the names of written objects durable; nothing to do where :meth:`write` does."""
        del keys

    def publish(self, key: str, data: bytes) -> None:
        """Write a small object atomically and durably: readers see all of it or no object.

        Raises FileExistsError where the key is taken. Where several processes publish the same key
        at once, exactly one succeeds.
        """

    def open(self, key: str) -> contextlib.AbstractContextManager[Reader]:
        """Open an object to read. Raises FileNotFoundError where there is none."""

    def read(self, key: str) -> bytes:
        """The bytes of a small object. Raises FileNotFoundError where there is none."""

    def names(self, folder: str) -> list[str]:
        """The names of objects and folders directly below a key, sorted."""

    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        """Every object below ``folder`` by its key relative to ``folder``: its length in bytes, and
        the time of its last change in seconds since 1970, by the store's clock."""

    def link(self, old: str, new: str) -> bool:
        """Give an object a second key; False where the store cannot.

        Raises FileExistsError where the new key is taken.
        """
        del old, new
        return False

    def remove(self, key: str) -> None:
        """Remove an object, durably; no error where there is none."""

    def remove_all(self, folder: str) -> None:
        """Remove every object below a key; an object that cannot be removed stays, no error."""

    def free_bytes(self) -> int | None:
        """The free bytes of the store; None where unknown."""
        return None
