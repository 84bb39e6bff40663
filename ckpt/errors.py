"""Errors about checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is missing, incomplete or damaged, or does not fit."""


class OtherRankError(CheckpointError):
    """This rank wrote its objects, but another rank failed and reports the reason."""


@contextmanager
def readable(what: object) -> Iterator[None]:
    """Raise a CheckpointError of one line in place of an OSError: ``what`` cannot be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} cannot be read: {error.strerror or error}") from None
