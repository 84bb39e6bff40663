"""Ends of a run that are no bug: one line for a person, and an exit code."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_LOST = 1
EXIT_BAD_INPUT = 2
EXIT_HEALTH = 3
EXIT_TRY_AGAIN = 75
EXIT_INTERRUPTED = 130
EXIT_CRASHED = 1
"""What Python ends with after a traceback."""


class InputError(ValueError):
    """A spec, a corpus or a folder that cannot be used. Exit code 2."""


class HealthError(RuntimeError):
    """Training has diverged and going on would not mend it. Exit code 3."""


class LostRankError(RuntimeError):
    """A collective failed, as when a rank is gone or stuck. Exit code 1; the same command goes on
    from the newest checkpoint."""
