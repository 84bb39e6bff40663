"""Requests to stop or to save: signals, and notices that other parts of the run watch for."""

from __future__ import annotations

import signal
from collections.abc import Callable
from enum import IntEnum
from types import FrameType


class StopCause(IntEnum):
    """Why a rank asks all ranks to stop; the step barrier carries the number."""

    NONE = 0
    SIGNAL = 1
    """SIGTERM or SIGINT."""
    NOTICE_FILE = 2
    """The preemption notice file has appeared."""
    TIME_LIMIT = 3
    """The time limit comes before one more step and its save."""
    SLOW_MACHINE = 4
    """A slow machine was excluded, and the run is to start again without the machine."""
    PART = 5
    """A part of a step wished for a stop; nothing starts the run again by itself."""

    @property
    def label(self) -> str:
        """The name in the log."""
        return self.name.lower()


class StopRequest:
    """Notes signals for the training loop, and asks others whether to stop.

    SIGTERM or SIGINT requests a stop after the step; a second SIGINT raises KeyboardInterrupt at
    once. SIGUSR1 requests a checkpoint.
    """

    def __init__(self) -> None:
        self.requested = self.save_requested = False
        self.is_final = False
        """Whether the ranks have stopped for a notice or a limit, and must not be started again.
        After a signal they may be: torchrun sends SIGTERM too when it forms the ranks anew."""
        self.ends_launch = False
        """Whether a part of the step wished for the stop: no start of ranks would change that."""
        self._watched: list[Callable[[], StopCause]] = []
        self._urgent: list[Callable[[], StopCause]] = []
        self._previous = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        }

    def watch(self, cause: Callable[[], StopCause], *, urgent: bool = False) -> None:
        """Ask ``cause`` at the begin of each step whether to stop, and with ``urgent`` also within
        an evaluation. ``cause`` must return at once: what takes time belongs into a thread."""
        self._watched.append(cause)
        if urgent:
            self._urgent.append(cause)

    @property
    def cause(self) -> StopCause:
        """Why this rank asks to stop after the step that begins now."""
        return self._cause(self._watched)

    @property
    def urgent_cause(self) -> StopCause:
        """Why this rank asks to stop at once, within an evaluation."""
        return self._cause(self._urgent)

    def _cause(self, watched: list[Callable[[], StopCause]]) -> StopCause:
        causes = [cause() for cause in watched]
        if self.requested:
            causes.append(StopCause.SIGNAL)
        return max(causes, default=StopCause.NONE)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            self.save_requested = True
            return
        self.requested = True
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def restore(self) -> None:
        """Restore the former signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
