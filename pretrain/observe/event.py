"""An event, and the place where a process publishes its events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run, after ``step`` committed steps."""

    name: ClassVar[str]
    """The value of ``event`` in the log."""
    step: int


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """One line for people, of something that has no event of its own."""

    name: ClassVar[str] = "notice"
    text: str
    problem: bool = False
    """Whether somebody should look at the matter."""


Sink = Callable[[Event], None]

_SINK_SECONDS = 5.0


class Events:
    """The place where a process publishes its events, from any thread."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = list(sinks)
        self._lock = threading.RLock()

    def subscribe(self, sink: Sink) -> None:
        """Let ``sink`` have every event from now on, after the sinks that are there."""
        self._sinks.append(sink)

    def note(self, text: str, *, step: int = 0, problem: bool = False) -> None:
        """Publish one line for people."""
        self.publish(Notice(step=step, text=text, problem=problem))

    def publish(self, event: Event) -> None:
        """Give an event to every sink, in the order of their subscription."""
        # A sink that hangs, as on a file system that is gone, must not silence the alarm of it.
        held = self._lock.acquire(timeout=_SINK_SECONDS)
        try:
            for sink in self._sinks:
                sink(event)
        finally:
            if held:
                self._lock.release()
