"""Requests to stop or to save, from signals."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Notes signals for the training loop.

    SIGTERM or SIGINT requests a stop after the step; a second SIGINT raises KeyboardInterrupt at
    once. SIGUSR1 requests a checkpoint.
    """

    def __init__(self) -> None:
        self.requested = self.save_requested = False
        self._previous = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        }

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
