"""Errors about checkpoints."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, is missing, incomplete or damaged, or does not fit."""


class OtherRankError(CheckpointError):
    """This rank wrote its objects, but another rank failed and reports the reason."""
