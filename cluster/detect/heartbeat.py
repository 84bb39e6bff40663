"""Heartbeats: where each rank is in its step, published from outside its training thread.

The training thread calls :meth:`Heartbeat.beat` where a phase of a step begins, which costs less
than a microsecond. A thread of each rank publishes the heartbeat to the job's store, at a rate that
all ranks together keep below :data:`PUBLICATIONS_PER_SECOND`. The rank publishes for how long its
training thread has not moved, and how long the rank's own history lets expect; clocks of different
machines are never compared. :mod:`cluster.detect.stuck` reads the heartbeats.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from statistics import median
from typing import NamedTuple

# Public, documented names that torch.distributed does not mark as exported for type checkers.
from torch.distributed import Store  # type: ignore[attr-defined]

from cluster.detect.devices import DeviceMonitor, DeviceReport
from cluster.detect.hang import line_of
from parallel import CommMonitor
from parallel.crossing import waits_over_replicas

PUBLICATIONS_PER_SECOND = 1000
"""Of all ranks together: more would be a load on the store."""
_PUBLISH_SECONDS = 1.0
_KEPT = 64
"""Durations that are kept for each phase."""
_FEWEST = 8
"""Durations of a phase from which on they say what is usual."""
MAD_TO_SIGMA = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation (Rousseeuw and
Croux, JASA 88, 1993, section 1)."""


class Place(NamedTuple):
    """Where a training thread is."""

    beats: int
    """How many times the thread has moved to another place."""
    phase: str
    step: int
    """Committed steps."""
    since: float
    """In seconds of :func:`time.monotonic`."""


class Heartbeat:
    """The place of this rank's training thread, for other threads to read."""

    def __init__(self) -> None:
        self.place = Place(0, "start", 0, time.monotonic())
        self._durations: dict[str, deque[float]] = {}

    def beat(self, phase: str, step: int) -> None:
        """Say that the training thread enters a phase, or another part of the phase.

        Args:
            phase: ``data``, ``forward_backward``, ``barrier``, ``optimizer``, ``save``,
                ``evaluate`` or ``finish``.
            step: committed steps.
        """
        now = time.monotonic()
        before = self.place
        durations = self._durations.get(before.phase)
        if durations is None:
            durations = self._durations[before.phase] = deque(maxlen=_KEPT)
        durations.append(now - before.since)
        self.place = Place(before.beats + 1, phase, step, now)

    def durations(self, phase: str) -> list[float]:
        """Seconds of the last stays in a phase, at most 64."""
        return list(self._durations.get(phase, ()))


def robust_scale(values: Sequence[float]) -> tuple[float, float]:
    """The median, and the standard deviation that the median absolute deviation stands for."""
    middle = median(values)
    return middle, MAD_TO_SIGMA * median(abs(value - middle) for value in values)


@dataclass(frozen=True)
class PhaseLimits:
    """How long a rank may stay in a phase before it counts as stuck.

    The limit is the larger of ``least_seconds`` and 3 times the median stay plus 10 standard
    deviations; the deviation is estimated by the median absolute deviation. Up to half of the
    recorded stays may be outliers, and the limit stays where it was.
    """

    least_seconds: float
    """No limit is below this value."""
    unknown_seconds: float
    """The limit of a phase that the rank was in fewer than 8 times, for instance while kernels are
    compiled."""
    of_phase: Mapping[str, float] = field(default_factory=dict)
    """Least limits of single phases."""

    @staticmethod
    def of_run(least_seconds: float, timeout_seconds: float) -> PhaseLimits:
        """The limits of a run, such that a hang is named before a collective times out.

        Args:
            least_seconds: the spec's least limit; half of the time-out where that is less.
            timeout_seconds: after which a collective fails.
        """
        half = timeout_seconds / 2
        # The last save waits until all bytes are durable, which may take long.
        return PhaseLimits(min(least_seconds, half), half, {"finish": max(1800.0, half)})

    def limit(self, phase: str, durations: Sequence[float]) -> float:
        """The limit of a phase in seconds, from the rank's former stays in the phase."""
        least = max(self.least_seconds, self.of_phase.get(phase, 0.0))
        if len(durations) < _FEWEST:
            return max(least, self.unknown_seconds)
        usual, sigma = robust_scale(durations)
        return max(least, 3 * usual + 10 * sigma)


@dataclass(frozen=True)
class Pulse:
    """A heartbeat as published."""

    published: int
    """How many times the rank has published."""
    beats: int
    collectives: int
    """How many collectives the rank has started."""
    phase: str
    step: int
    still_seconds: float
    """Since the rank has moved to its place or started a collective."""
    limit_seconds: float
    """From which on ``still_seconds`` means that the rank is stuck."""
    waits_in: str = ""
    """The collective that the host waits in."""
    at: str = ""
    """The source line of the training thread, where the rank has not moved for half its limit."""
    over: bool = False
    """The rank has left the run in order."""
    device: DeviceReport | None = None
    """Of the rank's GPU, where NVML is there."""

    def encode(self) -> str:
        """As the store has the heartbeat."""
        return json.dumps(astuple(self))

    @staticmethod
    def decode(text: bytes | str) -> Pulse:
        """From what :meth:`encode` returned."""
        values = json.loads(text)
        device = values[-1]
        if device is not None:
            device[-1] = tuple(device[-1])
            values[-1] = DeviceReport(*device)
        return Pulse(*values)


def publish_seconds(world: int, timeout_seconds: float) -> float:
    """Seconds between two publications of a rank."""
    return min(max(_PUBLISH_SECONDS, world / PUBLICATIONS_PER_SECOND), timeout_seconds / 10)


class HeartbeatPublisher:
    """Publishes this rank's heartbeat from a thread, until :meth:`close`.

    Must be made on the training thread.

    Args:
        store: see :func:`cluster.detect.hang.open_store`.
        rank: this rank.
        heartbeat: which the training thread moves.
        monitor: the monitor of this rank's collectives.
        limits: when this rank counts as stuck.
        seconds: between two publications.
        end: ends this process; called where the watch asks for the end of this rank. None where
            the watch never asks.
        device: the monitor of this rank's GPU.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        *,
        heartbeat: Heartbeat,
        monitor: CommMonitor,
        limits: PhaseLimits,
        seconds: float,
        end: Callable[[], None] | None = None,
        device: DeviceMonitor | None = None,
    ) -> None:
        self.store, self.rank, self.heartbeat, self.monitor = store, rank, heartbeat, monitor
        self.limits, self.seconds, self._end, self.device = limits, seconds, end, device
        self._main = threading.get_ident()
        self._published = 0
        self._collectives, self._collectives_since = 0, time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def _waits_in(self) -> str:
        if self.monitor.waiting:
            return self.monitor.describe()
        return "a collective of all ranks" if waits_over_replicas() else ""

    def pulse(self, *, over: bool = False) -> Pulse:
        """What this rank publishes next."""
        now, place, started = time.monotonic(), self.heartbeat.place, self.monitor.started
        if started != self._collectives:
            self._collectives, self._collectives_since = started, now
        still = now - max(place.since, self._collectives_since)
        limit = self.limits.limit(place.phase, self.heartbeat.durations(place.phase))
        self._published += 1
        return Pulse(
            published=self._published,
            beats=place.beats,
            collectives=started,
            phase=place.phase,
            step=place.step,
            still_seconds=round(still, 3),
            limit_seconds=round(limit, 3),
            waits_in=self._waits_in(),
            at=line_of(self._main) if still > limit / 2 else "",
            over=over,
            device=None if self.device is None else self.device.report(),
        )

    def _run(self) -> None:
        while True:
            # A store that does not answer now may answer later; collectives fail if not.
            with suppress(RuntimeError):
                self.store.set(str(self.rank), self.pulse().encode())
                if self._end is not None and self.store.check([f"end-{self.rank}"]):
                    self._end()
            if self._closed.wait(self.seconds):
                return

    def close(self) -> None:
        """Publish that this rank leaves the run in order, and stop."""
        self._closed.set()
        self._thread.join()
        with suppress(RuntimeError):
            self.store.set(str(self.rank), self.pulse(over=True).encode())
