"""Ends of a run that are no bug: one line for a person, and an exit code."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_BAD_INPUT = 2
EXIT_HEALTH = 3
EXIT_TRY_AGAIN = 75


class InputError(ValueError):
    """A spec, a corpus or a folder that cannot be used. Exit code 2."""


class HealthError(RuntimeError):
    """Training has diverged and going on would not mend it. Exit code 3."""
