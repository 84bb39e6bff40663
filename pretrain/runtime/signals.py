"""Requests to stop, from signals."""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """SIGTERM or SIGINT asks for an end after the step; a second SIGINT ends at once. SIGUSR1 asks
    for a save."""

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
        """Put the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
