"""The contract of a store, and what reads and writes of stores share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    pass

Progress = Callable[[int], None]
"""Called with the bytes of each object that has been written, by several threads."""

THREADS = min(4, os.cpu_count() or 1)
"""Objects that a rank reads at a time."""

Bytes: TypeAlias = "NDArray[np.uint8]"


class Reader(Protocol):
    """One object, opened."""

    size: int

    def read_into(self, start: int, parts: Sequence[Bytes]) -> None:
        """Fill ``parts`` one after the other with the bytes from ``start`` on.

        Raises OSError where there are fewer, or where they cannot be read.
        """

    def expect(self, spans: Sequence[tuple[int, int]]) -> None:
        """Say what will be read, each a start and a stop, in about this order: a store that is far
        away fetches it in few requests. Raises OSError where it cannot be read."""


@runtime_checkable
class Store(Protocol):
    """Objects under keys like ``objects/SAVE_ID/zarr.json``. All errors are OSErrors."""

    links: bool
    """Whether :meth:`link` spares a copy, and reading is cheap enough to see that it may."""

    def where(self, key: str = "") -> str:
        """What people call an object, or the store."""

    def write(self, key: str, parts: Iterable[memoryview | bytes]) -> None:
        """Make an object of ``parts`` in turn, durable but for its name: see :meth:`settle`.

        Raises FileExistsError where there is one, or half of one.
        """

    def settle(self, keys: Iterable[str]) -> None:
        """Make the names of written objects durable."""

    def publish(self, key: str, data: bytes) -> None:
        """Make an object appear whole and durable, or not at all. Raises FileExistsError where
        there is one: of any number that publish the same key at once, one succeeds."""

    def open(self, key: str) -> contextlib.AbstractContextManager[Reader]:
        """Read an object. Raises FileNotFoundError where there is none."""

    def read(self, key: str) -> bytes:
        """All of a small object. Raises FileNotFoundError where there is none."""

    def names(self, folder: str) -> list[str]:
        """The names directly below a key, sorted: of objects and of what has some below it."""

    def listing(self, folder: str) -> dict[str, tuple[int, float]]:
        """Every object below a key, by its key from there on: its length in bytes, and the store's
        time of its last change in seconds since 1970."""

    def link(self, old: str, new: str) -> bool:
        """Give an object a second key, without a second copy; False where that cannot be."""

    def remove(self, key: str) -> None:
        """Remove an object, durably; none is fine."""

    def remove_all(self, folder: str) -> None:
        """Remove every object below a key; none is fine."""

    def free_bytes(self) -> int | None:
        """Room that is left; None where that is not known."""
