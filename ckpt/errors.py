"""Errors about checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, or is not whole, or is not the one asked for."""


class OtherRankError(CheckpointError):
    """This rank did its part; another could not, and says why."""
