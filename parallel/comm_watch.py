"""What collectives cost a rank, and which one it is in.

Those that go through :func:`watched` are counted while a :class:`Watch` is installed: this
package's, FSDP's under :func:`parallel.apply_fsdp`, and a pipeline's sends and receives. A few
small ones are not: within PyTorch's loss over a cut vocabulary, within routers' losses, of the
gradients of norms under tensor parallelism, and those between hosts outside a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor


class Waitable(Protocol):
    """A collective under way."""

    def wait(self) -> object:
        """Return, or let the current stream go on, when it is over."""
        ...


@dataclass(frozen=True)
class Traffic:
    """Collectives on one rank."""

    count: int = 0
    bytes: int = 0
    """What this rank gave to them; of receives, what it got."""
    seconds: float = 0.0
    """From the start of each to its end, waiting for other ranks included; of sends and receives
    what was waited, since a receive begins long before there is something to send."""
    exposed_seconds: float = 0.0
    """Of these, those in which this rank, or its stream, waited and computed nothing."""

    def plus(self, other: Traffic) -> Traffic:
        """Both together."""
        return Traffic(
            self.count + other.count,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.exposed_seconds + other.exposed_seconds,
        )


Parallelism = Literal["dp", "ep", "tp", "cp", "pp", "world"]
"""What collectives are for: ``dp`` gathers parameters and sums gradients, ``world`` is the step
barrier and whatever else goes over all ranks."""
PARALLELISMS = get_args(Parallelism)


class Kind(NamedTuple):
    """Which collectives, and of which parallelism."""

    op: str
    group: Parallelism


class _Begun(NamedTuple):
    """The last collective that was begun; told in words only if somebody asks."""

    kind: Kind
    group: dist.ProcessGroup
    number: int


class Watch:
    """Adds up a rank's traffic, and knows the last collective that it began.

    Groups do not tell what they are for: axes that hold the same ranks share one.
    """

    def __init__(self) -> None:
        self._traffic: dict[Kind, Traffic] = {}
        self._counts: dict[str, int] = {}
        self._timed: deque[_CudaFlight] = deque()
        self._last: _Begun | None = None
        self.waiting = False
        """Whether the rank waits for that one now, on the host."""

    def start(
        self, kind: Kind, tensor: Tensor, group: dist.ProcessGroup, begin: Callable[[], Any]
    ) -> Waitable:
        """Begin a collective, see :func:`watched`."""
        number = self._counts.get(group.group_name, 0) + 1
        self._counts[group.group_name] = number
        self._last = _Begun(kind, group, number)
        flight = _CudaFlight if tensor.is_cuda else _Flight
        return flight(self, kind, tensor.numel() * tensor.element_size(), begin)

    def add(self, kind: Kind, traffic: Traffic) -> None:
        """Count what is over."""
        self._traffic[kind] = traffic.plus(self._traffic.get(kind, Traffic()))

    def land(self, flight: _CudaFlight) -> None:
        """Count what a stream waits for, once it is known; those before it that are, are."""
        self._timed.append(flight)
        while self._timed and self._timed[0].over:
            done = self._timed.popleft()
            self.add(done.kind, done.measured())

    def take(self) -> dict[Kind, Traffic]:
        """What was waited for since the last call. On CUDA it waits for the last one's end."""
        while self._timed:
            flight = self._timed.popleft()
            self.add(flight.kind, flight.measured())
        traffic, self._traffic = self._traffic, {}
        return traffic

    def describe(self) -> str:
        """It, as ``all_to_all of ep, number 37 among ranks 0, 1``."""
        if self._last is None:
            return "no collective"
        (op, name), group, number = self._last
        ranks = dist.get_process_group_ranks(group)
        told = ", ".join(map(str, ranks if len(ranks) < 9 else [*ranks[:7], "...", ranks[-1]]))
        return f"{op} of {name}, number {number} among ranks {told}"


_installed: Watch | None = None


def install_watch(watch: Watch | None) -> None:
    """Count this process's collectives from here on, or no longer."""
    global _installed
    _installed = watch


@contextmanager
def watch_collectives() -> Iterator[Watch]:
    """Count this process's collectives meanwhile."""
    before, watch = _installed, Watch()
    install_watch(watch)
    try:
        yield watch
    finally:
        install_watch(before)


def watched(
    kind: Kind, tensor: Tensor, group: dist.ProcessGroup | None, begin: Callable[[], Any]
) -> Waitable:
    """Begin a collective, seen by the installed watch where there is one.

    Args:
        kind: its name, as ``all_to_all``, and what it is for.
        tensor: what this rank gives to it; of a receive, what it gets.
        group: the ranks; all where None.
        begin: starts it and returns the work under way, which somebody must wait for.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if _installed is None or group.size() == 1:
        work: Waitable = begin()
        return work
    return _installed.start(kind, tensor, group, begin)


_POINT_TO_POINT = ("send", "recv")


def by_parallelism(traffic: Mapping[Kind, Traffic]) -> dict[str, Traffic]:
    """Added up to each of ``PARALLELISMS``, those without any too."""
    sums = dict.fromkeys(PARALLELISMS, Traffic())
    for kind, one in traffic.items():
        sums[kind.group] = one.plus(sums[kind.group])
    return sums


class _Flight:
    """On the host: a thread of the backend tells when it is over."""

    def __init__(self, watch: Watch, kind: Kind, size: int, begin: Callable[[], Any]) -> None:
        self.watch, self.kind, self.size = watch, kind, size
        self.began = time.perf_counter()
        self.work = begin()
        self.ended: list[float] = []
        note = self.ended.append
        # Some of gloo's have no future. And the callback must not hold the work: it would hold
        # itself, through C++, for ever.
        with suppress(RuntimeError):
            self.work.get_future().add_done_callback(lambda _: note(time.perf_counter()))

    def wait(self) -> None:
        """See :class:`Waitable`."""
        since = time.perf_counter()
        self.watch.waiting = True
        self.work.wait()
        self.watch.waiting = False
        until = time.perf_counter()
        began = since if self.kind.op in _POINT_TO_POINT else self.began
        exposed = until - since
        if self.ended and self.ended[0] <= since:
            until, exposed = max(self.ended[0], began), 0.0
        self.watch.add(self.kind, Traffic(1, self.size, until - began, exposed))


class _CudaFlight:
    """On a stream: events tell, once they are asked. Not yet run on an accelerator.

    What is waited for on another stream than the compute stream, as FSDP does, exposes nothing
    there; what the compute stream later waits for that one is not known, and not counted.
    """

    _beside: torch.cuda.Stream | None = None
    """Waits for every collective, so that its end can be told from that of the compute stream's
    wait; it computes nothing."""

    def __init__(self, watch: Watch, kind: Kind, size: int, begin: Callable[[], Any]) -> None:
        self.watch, self.kind, self.size = watch, kind, size
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self.computes = torch.cuda.current_stream() == torch.cuda.default_stream()
        self.events[0].record()
        self.work = begin()

    def wait(self) -> None:
        """See :class:`Waitable`."""
        _, ended, since, until = self.events
        since.record()
        self.work.wait()
        until.record()
        if _CudaFlight._beside is None:
            _CudaFlight._beside = torch.cuda.Stream()
        with torch.cuda.stream(_CudaFlight._beside):
            self.work.wait()
            ended.record()
        # It holds what it received.
        self.work = None
        self.watch.land(self)

    @property
    def over(self) -> bool:
        """Whether all is known of it."""
        return bool(self.events[1].query() and self.events[3].query())

    def measured(self) -> Traffic:
        """Waits for its end."""
        began, ended, since, until = self.events
        ended.synchronize()
        until.synchronize()
        exposed = since.elapsed_time(until) / 1e3 if self.computes else 0.0
        return Traffic(1, self.size, began.elapsed_time(ended) / 1e3, exposed)
