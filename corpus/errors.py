"""The error of input that cannot be used."""

from __future__ import annotations


class InputError(ValueError):
    """A spec, a corpus or a folder that cannot be used. Exit code 2."""
