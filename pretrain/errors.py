"""Expected ends of a run: each has an exit code, and an error prints one line for a person."""

from __future__ import annotations

from corpus.errors import InputError as InputError

EXIT_DONE = 0
EXIT_LOST = 1
EXIT_BAD_INPUT = 2
EXIT_HEALTH = 3
EXIT_TRY_AGAIN = 75
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
EXIT_CRASHED = 1
"""What Python ends with after a traceback."""


class HealthError(RuntimeError):
    """Training has diverged, and a rule of ``[health]`` stops the run. Exit code 3."""


class LostRankError(RuntimeError):
    """A collective failed because a rank is gone or stuck. Exit code 1; the same command resumes
    from the newest checkpoint."""


class CorruptionError(LostRankError):
    """Ranks have numbers that must be equal and are not. Every rank raises this error. Exit code 1;
    the same command resumes from the newest verified checkpoint."""
