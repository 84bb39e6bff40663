"""RUN_DIR/log.jsonl: one JSON object a line, written and read.

A line is an event of :mod:`pretrain.observe.events` with the event's fields:
``{"event": NAME, "time": SECONDS, ...}``. ``time`` is Unix time. A number that is not finite is
null. Every start of a run appends to the file; its ``start`` line has the ``log_version``. Lines
about the restore come before the ``start`` line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from pretrain.errors import InputError
from pretrain.observe.console import say
from pretrain.observe.event import Event
from pretrain.observe.events import EVENTS, RunDone, RunStarted, RunStopped
from pretrain.observe.step_events import StepCommitted

_TAIL_BYTES = 1 << 16
_MOST_WAITING_BYTES = 64 << 20
"""Of lines that cannot be written: more than a day of steps of one second each."""


class JsonlLog:
    """A sink that appends events to a file.

    Lines that a full disk does not take are kept, and written before the next line: a run whose
    disk has room again has a log without gaps. The run goes on meanwhile.

    Raises InputError where the file cannot be opened.
    """

    def __init__(self, path: Path, now: Callable[[], float] = time.time) -> None:
        self.path, self._now = path, now
        self.last_time = 0.0
        """The time of the newest event."""
        self._waiting = bytearray()
        self._failing = False
        self._writing = threading.Lock()
        try:
            if _is_torn(path):
                self._waiting += b"\n"
            self._file: int | None = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
            )
        except OSError as error:
            raise InputError(f"run_dir: {path} cannot be written: {error.strerror}") from None

    def __call__(self, event: Event) -> None:
        """Append one event."""
        self.last_time = round(self._now(), 3)
        if self._file is None:
            return
        line = {"event": event.name, "time": self.last_time, **logged(event)}
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        try:
            self._write(self._file)
        except OSError as error:
            # Training is worth more than its log; what matters is in the checkpoints.
            if len(self._waiting) > _MOST_WAITING_BYTES:
                say(f"{self.path} cannot be written ({error.strerror}); logging ends here")
                self._waiting.clear()
                self.close()
            elif not self._failing:
                self._failing = True
                say(f"{self.path} cannot be written ({error.strerror}); its lines wait for room")

    def _write(self, file: int) -> None:
        """Write what waits; of a line that a full disk has taken a part of, the rest.

        One thread writes at a time. Another one does not wait for a write that hangs.
        """
        if not self._writing.acquire(blocking=False):
            return
        try:
            while self._waiting:
                count = os.write(file, bytes(self._waiting))
                del self._waiting[:count]
            self._failing = False
        finally:
            self._writing.release()

    def close(self) -> None:
        """Append no more events."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # what could not be written is lost
            self._write(self._file)
        os.close(self._file)
        self._file = None


def _is_torn(path: Path) -> bool:
    """Whether a kill has cut off the last line of a log: the next line must not continue it."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def logged(event: Event) -> dict[str, Any]:
    """The fields of an event that the log has, as JSON values; fields that are None are left out
    where None is their default."""
    values = {}
    for each in fields(event):
        value = getattr(event, each.name)
        if each.metadata.get("log", True) and not (value is None and each.default is None):
            values[each.name] = _finite(value)
    return values


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value


@dataclass(frozen=True)
class LoggedEvent:
    """One line of a log."""

    event: Event
    time: float
    """Unix time."""


@dataclass(frozen=True)
class Log:
    """What a log file says."""

    lines: list[LoggedEvent]
    problems: list[str]
    """A line for each line that is no event; a last line that a kill cut off is no problem."""

    @property
    def events(self) -> list[Event]:
        """The events in the order of the file."""
        return [line.event for line in self.lines]


def read_log(path: Path) -> Log:
    """Read a log of any version. Raises OSError where the file cannot be read.

    Events and fields that this version does not know are passed over.
    """
    lines, problems = [], []
    texts = path.read_text(errors="replace").splitlines(keepends=True)
    for number, text in enumerate(texts, 1):
        try:
            found = _parse(text)
        except (ValueError, TypeError, KeyError) as error:
            if number < len(texts) or text.endswith("\n"):
                problems.append(f"{path}: line {number} is not an event: {error}")
            continue
        if found is not None:
            lines.append(found)
    return Log(lines, problems)


def last_step(path: Path) -> int | None:
    """The newest step in the last 64 KiB of a log; None where there is none, or no log."""
    for line in _tail(path):
        step = getattr(line.event, "step", None)
        if isinstance(step, int):
            return step
    return None


E = TypeVar("E", bound=Event)


def last_event(path: Path, kind: type[E]) -> E | None:
    """The newest event of a kind in the last 64 KiB of a log; None where there is none, or no
    log."""
    return next((line.event for line in _tail(path) if isinstance(line.event, kind)), None)


def _tail(path: Path) -> Iterator[LoggedEvent]:
    """The events in the last 64 KiB of a log, the newest first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            texts = file.read().decode(errors="replace").splitlines()
    except OSError:
        return
    for text in reversed(texts):
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if (line := _parse(text)) is not None:
                yield line


def _parse(text: str) -> LoggedEvent | None:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError("the line must be a JSON object")
    kind = EVENTS.get(values["event"])
    if kind is None:
        return None
    known: dict[str, Any] = {}
    for each in fields(kind):
        if each.name in values:
            value = values[each.name]
            # A null in a place of a number is a number that was not finite.
            known[each.name] = math.nan if value is None and each.type == "float" else value
        elif each.default is MISSING and each.default_factory is MISSING:
            raise ValueError(f"the event {kind.name} must have the field {each.name}")
    stamp = values["time"]
    if not isinstance(stamp, int | float):
        raise ValueError(f"the time ({stamp}) must be a number")
    return LoggedEvent(kind(**known), float(stamp))


@dataclass(frozen=True)
class History:
    """What a run's log says of its failures."""

    failures: int = 0
    """Starts that were not followed by an orderly end."""
    seconds: float = 0.0
    """Spent in committed steps."""

    @classmethod
    def read(cls, path: Path) -> History:
        """From the log of the starts before this one; an unreadable file has no history."""
        return cls.of(read_former(path))

    @classmethod
    def of(cls, lines: Sequence[LoggedEvent]) -> History:
        """From the lines of the starts before this one."""
        events = [line.event for line in lines]
        starts = sum(isinstance(event, RunStarted) for event in events)
        ends = sum(isinstance(event, RunStopped | RunDone) for event in events)
        steps = (event for event in events if isinstance(event, StepCommitted))
        return cls(max(0, starts - ends), sum(step.seconds for step in steps))


def read_former(path: Path) -> list[LoggedEvent]:
    """The lines of the starts before this one; none where the file cannot be read."""
    try:
        return read_log(path).lines
    except OSError:
        return []
