"""This process as one rank of a run: process groups, device, and decisions of all ranks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# A public, documented name that torch.distributed does not mark as exported for type checkers.
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

from ckpt.errors import CheckpointError
from cluster.detect import HangReport, Heartbeat, open_store, turn_on_flight_recorder
from parallel import CommMonitor
from parallel.comm import install_monitor
from parallel.crossing import across, world_group
from pretrain.errors import EXIT_BAD_INPUT, EXIT_LOST, InputError
from pretrain.runtime.launcher import launched_rank, launched_world
from pretrain.runtime.memory import keep_freed_memory
from pretrain.runtime.start_parts import StartParts

T = TypeVar("T")

# One rank may prepare a corpus, or read or write a checkpoint, for a long time while others wait.
_CONTROL_TIMEOUT = timedelta(hours=1)

_BUILD_SECONDS = 600.0
"""Ranks build the same things at the same time. A rank may be minutes behind the others: it imports
modules from busy storage, or compiles."""

_TIME_CUDA = "CONVOY_TIME_CUDA_COLLECTIVES"
"""Environment variable; 0 turns off times of collectives on CUDA, see :class:`CommMonitor`."""


@dataclass(frozen=True)
class Runtime:
    """One rank of a run. Made by :func:`start`, ended by :meth:`close`."""

    rank: int
    world: int
    device: torch.device
    control_group: dist.ProcessGroup
    """Gloo, for decisions on the host; not used inside a step or an evaluation, whose collectives
    fail after ``train.timeout_seconds``."""
    launch_id: str
    """Equal on all ranks of a launch, and different in every launch."""
    comm_monitor: CommMonitor = field(default_factory=CommMonitor)
    """The stats of this rank's collectives."""
    hang_report: HangReport | None = None
    """Reports a collective that fails or times out; None for one rank."""
    start_parts: StartParts = field(default_factory=StartParts)
    """What this process's start is spent on."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """The place of this process's training thread."""
    store: Callable[[str], Store] = open_store
    """Opens the store of all ranks, under a prefix."""
    lose: Callable[[Sequence[int], str], None] | None = None
    """Lets the run go on without the replicas of some ranks, for a reason; None where it cannot."""
    build_seconds: float = _BUILD_SECONDS
    """As long ranks wait for each other where all build the same, see :meth:`building`."""

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on this machine, from LOCAL_WORLD_SIZE; all ranks without it."""
        return min(int(os.environ.get("LOCAL_WORLD_SIZE", self.world)), self.world)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def agree(self, ok: bool) -> bool:
        """A barrier; True on all ranks where ``ok`` is True on all ranks."""
        word = torch.tensor(int(ok))
        self._reduce(word, dist.ReduceOp.MIN)
        return bool(word.item())

    def _reduce(self, word: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        self._wait(partial(dist.all_reduce, word, op))

    def _wait(self, begin: Callable[..., Any], group: dist.ProcessGroup | None = None) -> None:
        """Do a collective of the control group, or of another one."""
        group = self.control_group if group is None else group
        across(group, lambda: begin(group=group, async_op=True)).wait()

    @contextmanager
    def building(self) -> Iterator[None]:
        """Decisions of all ranks fail after ``build_seconds``, and no longer after an hour: no rank
        works alone meanwhile."""
        self.control_group.set_timeout(timedelta(seconds=self.build_seconds))
        try:
            yield
        finally:
            self.control_group.set_timeout(_CONTROL_TIMEOUT)

    def together(self, act: Callable[[], T]) -> T:
        """Call ``act`` on every rank; where it fails on one rank, fail on all ranks.

        ``act`` must not use collectives. The first failed rank raises its own error. Other ranks
        raise SystemExit with the exit code of that error and print nothing: a person then reads one
        line, or one traceback.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = act()
        except Exception as caught:
            error = caught
        code = EXIT_BAD_INPUT if isinstance(error, InputError | CheckpointError) else EXIT_LOST
        word = torch.tensor((self.rank if error else self.world) << 8 | code)
        self._reduce(word, dist.ReduceOp.MIN)
        failed, code = divmod(int(word), 1 << 8)
        if failed == self.rank and error is not None:
            raise error
        if failed < self.world:
            raise SystemExit(code)
        return value  # type: ignore[return-value]

    def first(self, act: Callable[[], T]) -> T | None:
        """Call ``act`` on rank 0 while other ranks wait; where it fails, fail on all ranks.

        Returns the value of ``act`` on rank 0, None on other ranks.
        """
        return self.together(lambda: act() if self.is_first else None)

    def from_first(self, act: Callable[[], int]) -> int:
        """Call ``act`` on rank 0 as :meth:`first` does, and return its value on every rank."""
        value = self.first(act)
        return self.broadcast(0 if value is None else value)

    def broadcast(self, value: int, source: int = 0) -> int:
        """The value of rank ``source``, on every rank."""
        return self.broadcast_all([value], source)[0]

    def broadcast_all(self, values: Sequence[int], source: int = 0) -> list[int]:
        """The values of rank ``source``, on every rank; as many of each rank."""
        words = torch.tensor(values, dtype=torch.int64)
        self._wait(partial(dist.broadcast, words, group_src=source))
        return [int(word) for word in words]

    def sum_in_training(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on the host; every rank must call.

        The sum fails where a rank is lost, after the time-out of a step's collectives. The control
        group would wait for an hour, as it must where one rank prepares a corpus.
        """
        moved = values.to(self.device, copy=True)
        self._wait(partial(dist.all_reduce, moved), world_group())
        return moved.cpu()

    def maximum_in_training(self, value: float) -> float:
        """The largest value of any rank, as :meth:`sum_in_training` exchanges values."""
        word = torch.tensor(value, dtype=torch.float64, device=self.device)
        self._wait(partial(dist.all_reduce, word, dist.ReduceOp.MAX), world_group())
        return float(word)

    def maximum(self, value: float) -> float:
        """The largest value of any rank."""
        word = torch.tensor(value, dtype=torch.float64)
        self._reduce(word, dist.ReduceOp.MAX)
        return float(word)

    def total(self, value: float) -> float:
        """The sum over ranks."""
        word = torch.tensor(value, dtype=torch.float64)
        self._reduce(word)
        return float(word)

    def gather_pairs(self, pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """The pairs of all ranks, in rank order. Numbers are at least 0; ranks may have different
        numbers of pairs."""
        most = int(self.maximum(len(pairs)))
        own = torch.full((most, 2), -1, dtype=torch.int64)
        own[: len(pairs)] = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        rows = [torch.empty_like(own) for _ in range(self.world)]
        self._wait(partial(dist.all_gather, rows, own))
        return [[(a, b) for a, b in row.tolist() if a >= 0] for row in rows]

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in rank order; without characters of code 0."""
        data = text.encode()
        own = torch.zeros(int(self.maximum(len(data))), dtype=torch.uint8)
        own[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.world)]
        self._wait(partial(dist.all_gather, rows, own))
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]

    def in_epoch(
        self,
        rank: int,
        world: int,
        *,
        control: dist.ProcessGroup,
        launch_id: str,
        store: Callable[[str], Store],
        lose: Callable[[Sequence[int], str], None],
    ) -> Runtime:
        """This process in an epoch of a run whose replicas come and leave; see
        :class:`parallel.Crossing`."""
        return replace(
            self,
            rank=rank,
            world=world,
            control_group=control,
            launch_id=launch_id,
            store=store,
            lose=lose,
        )

    def close(self) -> None:
        """Stop the monitor and the hang report, and destroy the process groups."""
        install_monitor(None)
        if self.hang_report is not None:
            self.hang_report.close()
        dist.destroy_process_group()


def times_cuda(environment: Mapping[str, str]) -> bool:
    """Whether collectives on CUDA are timed: unless the environment turns that off."""
    return environment.get(_TIME_CUDA) != "0"


def rank_device() -> torch.device:
    """The device of this rank: with CUDA the current one from now on, of number LOCAL_RANK.

    Raises InputError where LOCAL_RANK has no CUDA device.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"ranks on this machine must be at most its CUDA devices "
            f"({torch.cuda.device_count()}); this is local rank {local_rank}"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """The backend of the default process group: gloo on the host, and on CUDA NCCL beside."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def join_ranks(device: torch.device, timeout_seconds: float, world: int | None = None) -> None:
    """Make the default process group: of the first ``world`` ranks that torchrun has started, by
    default all, or of one rank without torchrun."""
    backend = backend_of(device)
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        world = launched_world() if world is None else world
        dist.init_process_group(backend, rank=launched_rank(), world_size=world, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def _open_control(timeout_seconds: float) -> tuple[dist.ProcessGroup, CommMonitor]:
    """The group for decisions on the host, and the monitor of collectives, installed."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
    assert isinstance(control, dist.ProcessGroup)
    monitor = CommMonitor(time_cuda=times_cuda(os.environ))
    install_monitor(monitor)
    return control, monitor


def start_replica(
    timeout_seconds: float, rank: int, world: int, *, device: torch.device
) -> Runtime:
    """This rank in its replica, whose ranks have the default process group already.

    Such a runtime serves to build; :meth:`Runtime.in_epoch` makes that of all replicas.

    Args:
        timeout_seconds: as for :func:`start`.
        rank: in the replica.
        world: the ranks of the replica.
        device: of this rank.
    """
    parts = StartParts()
    parts.mark("imports")
    if device.type == "cpu":
        keep_freed_memory()
    control, monitor = _open_control(timeout_seconds)
    parts.mark("rendezvous")
    return Runtime(
        rank=rank,
        world=world,
        device=device,
        control_group=control,
        launch_id="",
        comm_monitor=monitor,
        start_parts=parts,
    )


def start(timeout_seconds: float, world: int | None = None) -> Runtime:
    """Join the process group that torchrun describes; without torchrun, make one of one rank.

    With CUDA a rank takes the device LOCAL_RANK, with NCCL on the device and gloo on the host.

    Args:
        timeout_seconds: time after which a collective of a step fails.
        world: the number of ranks that train, which are the first of those that were started; by
            default all.

    Raises InputError where LOCAL_RANK has no CUDA device.
    """
    rank, world = launched_rank(), launched_world() if world is None else world
    parts = StartParts()
    parts.mark("imports")
    device = rank_device()
    if device.type == "cpu":
        keep_freed_memory()
    turn_on_flight_recorder()
    join_ranks(device, timeout_seconds, world)
    # All ranks come here at once: a rank that is lost meanwhile must not be waited for as long as
    # for a rank that works alone.
    control, monitor = _open_control(timeout_seconds)
    token = torch.tensor(secrets.randbits(62), dtype=torch.int64)
    dist.broadcast(token, 0, group=control)
    control.set_timeout(_CONTROL_TIMEOUT)
    hang_report = HangReport.start(rank, world, monitor=monitor, timeout_seconds=timeout_seconds)
    parts.mark("rendezvous")
    return Runtime(
        rank=rank,
        world=world,
        device=device,
        control_group=control,
        launch_id=f"{int(token):016x}",
        comm_monitor=monitor,
        hang_report=hang_report,
        start_parts=parts,
        build_seconds=max(_BUILD_SECONDS, timeout_seconds),
    )
