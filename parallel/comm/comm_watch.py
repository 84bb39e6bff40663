"""The cost of a rank's collectives, and the name of the one that the rank is in.

A collective that starts through :func:`monitored` is counted while a :class:`CommMonitor` is
installed. That holds for this package's collectives, for FSDP's under :func:`parallel.apply_fsdp`,
and for a pipeline's sends and receives. A few small collectives are not counted: those inside
PyTorch's loss over a sharded vocabulary, inside the routers' losses, of the gradients of norms
under tensor parallelism, of the numbers of tokens that ``max_tokens_per_rank`` bounds, and those
between hosts outside a step.
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

from parallel.crossing import across, group_of, ranks_of
from parallel.layout import name_ranks


class CollectiveWork(Protocol):
    """A collective that has started, as ``torch.distributed.Work`` is."""

    def wait(self) -> object:
        """Block the host, or on CUDA the current stream, until the collective has ended."""
        ...


@dataclass(frozen=True)
class CommStats:
    """Count, size and time of some collectives on one rank.

    On CUDA the times are 0 where the monitor was made without ``time_cuda``.
    """

    count: int = 0
    bytes: int = 0
    """Bytes of the tensors that this rank gave; of receives, bytes of the tensors it received."""
    seconds: float = 0.0
    """From the start of each collective to its end, with the time that other ranks are late. Of
    sends and receives, the time in ``wait``: a receive starts long before its sender does."""
    exposed_seconds: float = 0.0
    """The part of ``seconds`` in which this rank, or its compute stream, waited without
    computing (exposed communication)."""

    def plus(self, other: CommStats) -> CommStats:
        """The sums of both."""
        return CommStats(
            self.count + other.count,
            self.bytes + other.bytes,
            self.seconds + other.seconds,
            self.exposed_seconds + other.exposed_seconds,
        )


Parallelism = Literal["dp", "ep", "tp", "cp", "pp", "world"]
"""The purpose of a collective: ``dp`` gathers parameters and reduces gradients; ``world`` is the
step barrier and every other collective over all ranks."""
PARALLELISMS = get_args(Parallelism)


class CollectiveKind(NamedTuple):
    """An operation, as ``all_to_all``, and the parallelism that the operation serves."""

    op: str
    group: Parallelism


class _Started(NamedTuple):
    """The collective that started last; put into words only when somebody asks."""

    kind: CollectiveKind
    group: dist.ProcessGroup
    number: int


class CommMonitor:
    """Sums a rank's :class:`CommStats`, and knows the collective that started last.

    A collective's purpose comes from the caller: axes with the same ranks share one process group.

    Args:
        time_cuda: time collectives on CUDA, with events and one more stream. Events are read where
            the host has waited for the device anyway, at the end of a step. Without, CUDA
            collectives are counted, and their times are 0.
    """

    def __init__(self, time_cuda: bool = True) -> None:
        self.time_cuda = time_cuda
        self._stats: dict[CollectiveKind, CommStats] = {}
        self._numbers: dict[str, int] = {}
        self._cuda_works: deque[_CudaTimedWork] = deque()
        self._last: _Started | None = None
        self.started = 0
        """How many collectives this rank has started."""
        self.waiting = False
        """Whether the host waits for the last collective now, or its wait has failed."""
        self.wait_began = 0.0
        """When the host's newest wait began, in seconds of :func:`time.perf_counter`."""

    def start(
        self,
        kind: CollectiveKind,
        tensor: Tensor,
        group: dist.ProcessGroup,
        begin: Callable[[], Any],
    ) -> CollectiveWork:
        """Start a collective, as :func:`monitored` does."""
        number = self._numbers.get(group.group_name, 0) + 1
        self._numbers[group.group_name] = number
        self._last = _Started(kind, group, number)
        self.started += 1
        size = tensor.numel() * tensor.element_size()
        if not tensor.is_cuda:
            return _TimedWork(self, kind, size, begin)
        if self.time_cuda:
            return _CudaTimedWork(self, kind, size, begin)
        self.add(kind, CommStats(1, size))
        work: CollectiveWork = begin()
        return work

    def add(self, kind: CollectiveKind, stats: CommStats) -> None:
        """Add the stats of a collective that has ended."""
        self._stats[kind] = stats.plus(self._stats.get(kind, CommStats()))

    def add_later(self, work: _CudaTimedWork) -> None:
        """Add the times of ``work`` once the GPU has recorded them; add those recorded by now."""
        self._cuda_works.append(work)
        while self._cuda_works and self._cuda_works[0].is_recorded:
            done = self._cuda_works.popleft()
            self.add(done.kind, done.stats())

    def forget(self) -> None:
        """Forget a collective that has failed, and whose group is no more."""
        self._last, self.waiting = None, False

    @property
    def exposed_seconds(self) -> float:
        """The exposed seconds of all collectives since the last ``take``. With ``time_cuda`` the
        host waits for the last collective's end."""
        self._add_cuda_works()
        return sum(stats.exposed_seconds for stats in self._stats.values())

    @property
    def waited_seconds(self) -> float:
        """Seconds for which the host has waited for the last collective, to now; 0 where the host
        does not wait, and on CUDA."""
        waits = self.waiting and self.wait_began > 0
        return time.perf_counter() - self.wait_began if waits else 0.0

    def take(self) -> dict[CollectiveKind, CommStats]:
        """The stats since the last call. With ``time_cuda`` the host waits for the last
        collective's end."""
        self._add_cuda_works()
        stats, self._stats = self._stats, {}
        return stats

    def _add_cuda_works(self) -> None:
        while self._cuda_works:
            work = self._cuda_works.popleft()
            self.add(work.kind, work.stats())

    @property
    def waits_in_group(self) -> str | None:
        """The name of the group of the collective that the host waits for; None where the host does
        not wait, and on CUDA."""
        last = self._last
        return last.group.group_name if self.waiting and last is not None else None

    def describe(self) -> str:
        """The last collective, as ``all_to_all of ep, number 37 among ranks 0-1``."""
        if self._last is None:
            return "no collective"
        (op, name), group, number = self._last
        ranks = name_ranks(ranks_of(group), most=8)
        return f"{op} of {name}, number {number} among {ranks}"


_installed: CommMonitor | None = None


def install_monitor(monitor: CommMonitor | None) -> None:
    """Send this process's collectives through ``monitor`` from now on; None: through no monitor."""
    global _installed
    _installed = monitor


@contextmanager
def monitor_collectives(time_cuda: bool = True) -> Iterator[CommMonitor]:
    """Count this process's collectives inside the ``with`` block."""
    before, monitor = _installed, CommMonitor(time_cuda)
    install_monitor(monitor)
    try:
        yield monitor
    finally:
        install_monitor(before)


def monitored(
    kind: CollectiveKind,
    tensor: Tensor,
    group: dist.ProcessGroup | None,
    begin: Callable[[], Any],
) -> CollectiveWork:
    """Start a collective, counted by the installed monitor where there is one.

    Args:
        kind: the operation, as ``all_to_all``, and its purpose.
        tensor: what this rank gives; of a receive, the buffer that is filled.
        group: the ranks; all ranks where None.
        begin: starts the collective and returns its work. The caller must wait for the work.
    """
    group = group_of(group)
    if _installed is None or group.size() == 1:
        work: CollectiveWork = across(group, begin)
        return work
    return _installed.start(kind, tensor, group, lambda: across(group, begin))


_POINT_TO_POINT = ("send", "recv")


def by_parallelism(stats: Mapping[CollectiveKind, CommStats]) -> dict[str, CommStats]:
    """The sums for each of ``PARALLELISMS``; zeros for one without collectives."""
    sums = dict.fromkeys(PARALLELISMS, CommStats())
    for kind, one in stats.items():
        sums[kind.group] = one.plus(sums[kind.group])
    return sums


class _TimedWork:
    """A collective of host tensors: a thread of the backend reports its end."""

    def __init__(
        self, monitor: CommMonitor, kind: CollectiveKind, size: int, begin: Callable[[], Any]
    ) -> None:
        self.monitor, self.kind, self.size = monitor, kind, size
        self.started = time.perf_counter()
        self.work = begin()
        self.ended: list[float] = []
        note = self.ended.append
        # Some works of gloo have no future. The callback must not refer to the work: the work
        # refers to the callback through C++, and no garbage collector would free the two.
        with suppress(RuntimeError):
            self.work.get_future().add_done_callback(lambda _: note(time.perf_counter()))

    def wait(self) -> None:
        since = self.monitor.wait_began = time.perf_counter()
        self.monitor.waiting = True
        self.work.wait()
        self.monitor.waiting = False
        until = time.perf_counter()
        started = since if self.kind.op in _POINT_TO_POINT else self.started
        exposed = until - since
        if self.ended and self.ended[0] <= since:
            until, exposed = max(self.ended[0], started), 0.0
        self.monitor.add(self.kind, CommStats(1, self.size, until - started, exposed))


class _CudaTimedWork:
    """A collective of CUDA tensors, timed by events.

    No GPU has run this class. Known gap: FSDP waits for its collectives on a stream of its own,
    where the wait counts as no exposed time; the time that the compute stream then waits for
    FSDP's stream is not measured.
    """

    _end_stream: torch.cuda.Stream | None = None
    """Waits for every collective and computes nothing. An event on this stream marks the end of
    the collective itself; the compute stream may come to its own wait much later."""

    def __init__(
        self, monitor: CommMonitor, kind: CollectiveKind, size: int, begin: Callable[[], Any]
    ) -> None:
        self.monitor, self.kind, self.size = monitor, kind, size
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self.on_compute_stream = torch.cuda.current_stream() == torch.cuda.default_stream()
        self.events[0].record()
        self.work = begin()

    def wait(self) -> None:
        _, ended, since, until = self.events
        since.record()
        self.work.wait()
        until.record()
        if _CudaTimedWork._end_stream is None:
            _CudaTimedWork._end_stream = torch.cuda.Stream()
        with torch.cuda.stream(_CudaTimedWork._end_stream):
            self.work.wait()
            ended.record()
        self.work = None  # the work holds the tensors of the collective
        self.monitor.add_later(self)

    @property
    def is_recorded(self) -> bool:
        """Whether the GPU has passed the last events."""
        return bool(self.events[1].query() and self.events[3].query())

    def stats(self) -> CommStats:
        """Times from the events; the host waits until the GPU has passed the last events."""
        started, ended, since, until = self.events
        ended.synchronize()
        until.synchronize()
        exposed = since.elapsed_time(until) / 1e3 if self.on_compute_stream else 0.0
        return CommStats(1, self.size, started.elapsed_time(ended) / 1e3, exposed)
