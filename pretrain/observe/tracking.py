"""Gives a run's values to experiment trackers, which may come from outside of Convoy.

Training never waits for a tracker: values go through a queue to a thread. An error of a tracker
ends its tracking, and not the run.
"""

from __future__ import annotations

import contextlib
import math
import pkgutil
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from pretrain.errors import InputError
from pretrain.observe.console import complain
from pretrain.observe.event import Event
from pretrain.observe.events import RunDone, RunFailed, RunStarted, RunStopped
from pretrain.observe.metric import measurements
from pretrain.spec import TrackingConfig

_QUEUED = 1000
_LAST_SECONDS = 30.0


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run at a start."""

    name: str
    run_id: str
    """The same in all starts of a run: a tracker goes on with what it has of the run."""
    step: int
    """After which the start goes on."""
    parameters: dict[str, str]
    """Fields of the spec by their dotted names, and the experiment record below ``record.``."""


class Tracker(Protocol):
    """What the adapters have in common. All calls come from one thread."""

    def start(self, about: About) -> None:
        """Begin, or go on with a run that the tracker has."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record some values of a step."""

    def finish(self, *, ok: bool) -> None:
        """End this start."""


def open_trackers(config: TrackingConfig, run_dir: Path) -> list[Tracking]:
    """The sinks of ``[tracking]``.

    A tracker is a class that is called with the config and the run's folder, and then has the
    methods of :class:`Tracker`; it raises ImportError or ValueError where it cannot work.

    Raises InputError where a tracker is not there, is not installed, or is no tracker.
    """
    return [Tracking(name, _tracker(name, config, run_dir)) for name in config.to]


def _tracker(name: str, config: TrackingConfig, run_dir: Path) -> Tracker:
    try:
        tracker = pkgutil.resolve_name(config.CLASSES.get(name, name))(config, run_dir)
    except InputError:
        raise
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InputError(
            f"tracking.to ({name}) cannot be used: {' '.join(str(error).split())}; it must be "
            "package.module:Class of a class that takes a TrackingConfig and the run's folder"
        ) from None
    missing = [word for word in ("start", "log", "finish") if not hasattr(tracker, word)]
    if missing:
        raise InputError(f"tracking.to ({name}) has no method {missing[0]}, as a Tracker has")
    return cast(Tracker, tracker)


class Tracking:
    """A sink that gives a run's values to one tracker, from a thread of its own.

    Args:
        name: of the tracker, for people.
        tracker: the adapter.
    """

    def __init__(self, name: str, tracker: Tracker) -> None:
        self.name, self.tracker = name, tracker
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_QUEUED)
        self._left_out = 0
        self._ok = False
        self._begun = False
        self._thread = threading.Thread(target=self._work, daemon=True, name=f"tracker-{name}")
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Queue what one event says."""
        match event:
            case RunStarted():
                about = about_of(event)
                self._begun = True
                self._put(lambda: self.tracker.start(about))
            case RunDone() | RunStopped():
                self._ok = True
            case RunFailed():
                self._ok = False
            case _:
                values = {k: v for k, v in values_of(event).items() if math.isfinite(v)}
                if values and self._begun:
                    self._put(lambda: self.tracker.log(event.step, values))

    def close(self) -> None:
        """Wait a while for what is queued, and end the tracking."""
        end = time.monotonic() + _LAST_SECONDS
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_LAST_SECONDS)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            complain(f"tracker {self.name} does not end within {_LAST_SECONDS:.0f} s: left behind")
        if self._left_out:
            complain(f"tracker {self.name} was too slow for {self._left_out} values")

    def _put(self, act: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(act)
        except queue.Full:
            self._left_out += 1

    def _work(self) -> None:
        act: Callable[[], None] | None = None
        try:
            while (act := self._queue.get()) is not None:
                act()
            if self._begun:
                self.tracker.finish(ok=self._ok)
        except Exception as error:
            text = " ".join(str(error).split()) or type(error).__name__
            complain(f"tracker {self.name} ends; training goes on: {text}")
            while act is not None and self._queue.get() is not None:
                pass


def about_of(start: RunStarted) -> About:
    """What a start tells of itself."""
    record = {f"record.{key}": value for key, value in start.record.items()}
    parameters = {**dict(_flat(start.spec)), **record, "layout": start.layout}
    parameters["spec_hash"] = start.spec_hash
    return About(start.job, start.record.get("run_id", ""), start.step, parameters)


def _flat(values: Mapping[str, Any], before: str = "") -> Sequence[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            pairs += _flat(value, f"{before}{key}.")
        elif value is not None:
            pairs.append((f"{before}{key}", str(value)))
    return pairs


def values_of(event: Event) -> dict[str, float]:
    """The values of an event, by the names that all trackers use."""
    values: dict[str, float] = {}
    for metric, series in measurements(event):
        if metric.tracker:
            named = ((metric.tracker.format(*key), value) for key, value in series.items())
            values |= {name: float(value) for name, value in named if value is not None}
    return values
