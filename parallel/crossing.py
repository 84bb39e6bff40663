"""Groups that cross replicas, in a run in which replicas leave and come.

A run with several replicas (``dp_replicate``) can go on without one of them. Then the default
process group has the ranks of one replica, and two groups cross replicas: all ranks of the run, and
the ranks that hold equal shards. Both are made anew whenever a replica leaves or comes: an epoch. A
collective over a group whose epoch is over ends with :class:`RegroupError`, also where the host
waits for a rank that will never answer.

Without a :class:`Crossing` the default process group has all ranks, as everywhere in PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Public, documented names that torch.distributed does not mark as exported for type checkers.
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

T = TypeVar("T")


class RegroupError(RuntimeError):
    """The epoch of a group is over: a replica has left, or wants to come."""


class Crossing:
    """The groups of the present epoch that cross replicas.

    :meth:`interrupt` may be called on any thread; everything else is for the training thread.

    Args:
        device: of the run's tensors.
        timeout: after which a collective fails.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self.device, self.timeout = device, timeout
        self.gate: Callable[[], None] = lambda: None
        """See :func:`gate`."""
        self.world: dist.ProcessGroup | None = None
        """All ranks of the run."""
        self.column: dist.ProcessGroup | None = None
        """The ranks that hold this rank's shards, one of each replica."""
        self.control: dist.ProcessGroup | None = None
        """All ranks, for decisions on the host."""
        self.why: str | None = None
        """Why the epoch is over; None while it lasts."""
        self.error: RuntimeError | None = None
        """Why gradients of the epoch are not summed over replicas."""
        self.waits = False
        """Whether the training thread waits for a collective."""
        self._lock = threading.Lock()
        self._waiting: set[threading.Event] = set()
        self._left: list[Any] = []
        """Collectives of former epochs that a backend's thread may still be in, and their groups:
        a group that is freed would wait for them."""

    def regroup(
        self, store: Store, rank: int, world: int, *, index: int, column: tuple[int, int]
    ) -> None:
        """Make the groups of a new epoch, with all its ranks.

        Args:
            store: of this epoch alone, shared by its ranks.
            rank: this rank in the epoch.
            world: the ranks of the epoch.
            index: this rank's place in its replica.
            column: the number of this rank's replica, and of all replicas.

        Raises RegroupError where the epoch is over before all ranks are there.
        """
        make = self._make
        self.world = self._interruptible(lambda: make(store, "world", rank, world))
        self.control = self._interruptible(lambda: make(store, "control", rank, world, host=True))
        name = f"column-{index}"
        self.column = self._interruptible(lambda: make(store, name, *column))

    def begin(self) -> None:
        """Forget the groups of the former epoch: what is interrupted from now on is the next."""
        with self._lock:
            self.why = self.error = None
        self._left = [work for work in self._left if not work[0].is_completed()]
        for group in (self.world, self.column, self.control):
            if group is not None and self.device.type == "cuda":
                group.abort()  # no GPU has run this
        self.world = self.column = self.control = None

    def interrupt(self, why: str) -> None:
        """End the epoch: whoever waits for one of its collectives gets RegroupError."""
        with self._lock:
            if self.why is None:
                self.why = why
            for waiting in self._waiting:
                waiting.set()
        if self.device.type == "cuda":  # the host does not wait for a collective, but for a stream
            for group in (self.world, self.column):
                if group is not None:
                    group.abort()  # no GPU has run this

    def check(self) -> None:
        """Raise RegroupError where the epoch is over."""
        if self.why is not None:
            raise RegroupError(self.why)

    def holds(self, group: dist.ProcessGroup) -> bool:
        """Whether a group crosses replicas."""
        return group is self.world or group is self.column or group is self.control

    def wait(self, work: Any, group: Any = None) -> None:
        """Wait for a collective that has started.

        Raises RegroupError where the epoch is over first, and RuntimeError where it fails.
        """
        if self.device.type == "cuda" and group is not self.control:
            self.check()
            work.wait()
            return
        self.waits = True
        ended = self._wait_for(lambda done: work.get_future().add_done_callback(done))
        self.waits = False
        if not ended and not work.is_completed():
            self._left.append((work, group))
            raise RegroupError(self.why)
        work.wait()

    def _wait_for(self, begin: Callable[[Callable[[Any], None]], None]) -> bool:
        """Wait until the callback is called; False where the epoch was over before."""
        done = threading.Event()
        with self._lock:
            if self.why is not None:
                done.set()
            self._waiting.add(done)
        ended: list[bool] = []

        def end(_: Any) -> None:
            ended.append(True)
            done.set()

        begin(end)
        done.wait()
        with self._lock:
            self._waiting.discard(done)
        return bool(ended)

    def _interruptible(self, act: Callable[[], T]) -> T:
        """Call ``act`` on a thread; RegroupError where the epoch is over before it returns."""
        values: list[T] = []
        errors: list[BaseException] = []

        def begin(end: Callable[[Any], None]) -> None:
            def run() -> None:
                try:
                    values.append(act())
                except BaseException as error:
                    errors.append(error)
                end(None)

            threading.Thread(target=run, name="regroup", daemon=True).start()

        if not self._wait_for(begin) and not values and not errors:
            raise RegroupError(self.why)
        if errors:
            raise errors[0]
        return values[0]

    def _make(
        self, store: Store, name: str, rank: int, size: int, host: bool = False
    ) -> dist.ProcessGroup:
        """A group that torch.distributed's registry does not know: the registry wants every group
        to be of ranks of the default group."""
        own = PrefixStore(name, store)
        kinds: Any = dist.ProcessGroup.BackendType
        group: Any = dist.ProcessGroup(own, rank, size)
        gloo: Any = dist.ProcessGroupGloo(PrefixStore("cpu", own), rank, size, self.timeout)
        on_host = host or self.device.type == "cpu"
        group._set_default_backend(kinds.GLOO if on_host else kinds.NCCL)
        group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if not on_host:
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = self.timeout
            backend = nccl(PrefixStore("cuda", own), rank, size, options)
            backend.eager_connect_single_device(self.device)  # not at the memory limit, later
            group._register_backend(self.device, kinds.NCCL, backend)
        group._set_group_name(f"{name}-{rank}")
        made: dist.ProcessGroup = group
        return made


_installed: Crossing | None = None


def install_crossing(crossing: Crossing | None) -> None:
    """Let collectives over replicas use the groups of ``crossing`` from now on."""
    global _installed
    _installed = crossing


def installed_crossing() -> Crossing | None:
    """The crossing groups of this process; None where the default group has all ranks."""
    return _installed


def world_group() -> dist.ProcessGroup:
    """All ranks of the run."""
    group = dist.group.WORLD if _installed is None else _installed.world
    if group is None:
        raise ValueError("no process group of all ranks: call init_process_group() first")
    return group


def run_rank() -> int:
    """This process's rank among all ranks of the run."""
    return dist.get_rank() if _installed is None else world_group().rank()


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group itself; all ranks of the run where None."""
    return world_group() if group is None else group


def gate() -> None:
    """Before collectives within a replica: raise RegroupError where the epoch is over for any of
    its ranks.

    A collective over replicas may succeed on one rank and fail on another rank of a replica. The
    first would wait for the second in their next collective for ever. Every rank of the replica
    must call.
    """
    if _installed is not None:
        _installed.gate()


def check_epoch() -> None:
    """Raise RegroupError where the epoch is over."""
    if _installed is not None:
        _installed.check()


def waits_over_replicas() -> bool:
    """Whether the training thread waits in a collective over replicas."""
    return _installed is not None and _installed.waits


def check_sums() -> None:
    """After a backward: raise the error of a sum of gradients over replicas."""
    if _installed is not None and _installed.error is not None:
        raise _installed.error


class _CrossingWork:
    """A collective over replicas."""

    def __init__(self, crossing: Crossing, group: dist.ProcessGroup, work: Any) -> None:
        self.crossing, self.group, self.work = crossing, group, work

    def get_future(self) -> Any:
        """Of the collective."""
        return self.work.get_future()

    def wait(self) -> None:
        """See :meth:`Crossing.wait`."""
        self.crossing.wait(self.work, self.group)


def across(group: dist.ProcessGroup, begin: Callable[[], Any]) -> Any:
    """Start a collective, so that its wait ends with the epoch where the group crosses replicas."""
    crossing = _installed
    if crossing is None or not crossing.holds(group):
        return begin()
    crossing.check()
    return _CrossingWork(crossing, group, begin())


def ranks_of(group: dist.ProcessGroup) -> Sequence[int]:
    """The ranks of a group, for people."""
    try:
        return dist.get_process_group_ranks(group)
    except KeyError:  # a group that crosses replicas, of this epoch or of an earlier one
        return range(group.size())
