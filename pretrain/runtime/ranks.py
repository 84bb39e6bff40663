"""This process among its ranks: groups, device, signals, and doing things together."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from cluster.detect import RollCall
from parallel import Watch, install_watch
from pretrain.errors import EXIT_BAD_INPUT, InputError
from pretrain.runtime.memory import keep_freed_memory

T = TypeVar("T")

# Preparing a corpus or writing a checkpoint may take long on one rank while the others wait.
_CONTROL_TIMEOUT = timedelta(hours=1)


@dataclass(frozen=True)
class Runtime:
    """One rank of a run. Made by :func:`start`, ended by :meth:`close`."""

    rank: int
    world: int
    device: torch.device
    control_group: dist.ProcessGroup
    """Gloo, for decisions on the host; never used from within a step."""
    launch_id: str
    """The same on all ranks, and unlike any other launch's."""
    watch: Watch = field(default_factory=Watch)
    """Of this rank's collectives."""
    roll_call: RollCall | None = None
    """For when one does not end; None on one rank."""

    @property
    def ranks_per_node(self) -> int:
        """Consecutive ranks that share a machine, as the launcher says; all where none says."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def agree(self, ok: bool) -> bool:
        """A barrier that also asks: True on all ranks where all say True."""
        word = torch.tensor(int(ok))
        dist.all_reduce(word, dist.ReduceOp.MIN, group=self.control_group)
        return bool(word.item())

    def together(self, act: Callable[[], T]) -> T:
        """Let each rank act, without collectives; fail on all where it fails on one.

        The first rank that failed raises its own error. The others end with the exit code of bad
        input in silence, so that a person reads one line, or one traceback.
        """
        value: T | None = None
        error: Exception | None = None
        try:
            value = act()
        except Exception as caught:
            error = caught
        failed = torch.tensor(self.rank if error else self.world)
        dist.all_reduce(failed, dist.ReduceOp.MIN, group=self.control_group)
        if int(failed) == self.rank and error is not None:
            raise error
        if int(failed) < self.world:
            raise SystemExit(EXIT_BAD_INPUT)
        return value  # type: ignore[return-value]

    def first(self, act: Callable[[], T]) -> T | None:
        """Let rank 0 act while the others wait; returns what rank 0 did there, and None elsewhere.

        Raises on every rank where rank 0 fails.
        """
        return self.together(lambda: act() if self.is_first else None)

    def from_first(self, act: Callable[[], int]) -> int:
        """The number that ``act`` returns on rank 0, on every rank. Raises as :meth:`first`."""
        value = self.first(act)
        return self.broadcast(0 if value is None else value)

    def broadcast(self, value: int, source: int = 0) -> int:
        """The value of rank ``source``."""
        word = torch.tensor(value, dtype=torch.int64)
        dist.broadcast(word, source, group=self.control_group)
        return int(word)

    def maximum(self, value: float) -> float:
        """The largest value of any rank."""
        word = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(word, dist.ReduceOp.MAX, group=self.control_group)
        return float(word)

    def total(self, value: float) -> float:
        """The sum over ranks."""
        word = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(word, group=self.control_group)
        return float(word)

    def gather_pairs(self, pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Every rank's pairs of whole numbers from 0, in rank order; each may bring another
        count."""
        most = int(self.maximum(len(pairs)))
        own = torch.full((most, 2), -1, dtype=torch.int64)
        own[: len(pairs)] = torch.tensor(pairs, dtype=torch.int64).view(-1, 2)
        rows = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(rows, own, group=self.control_group)
        return [[(a, b) for a, b in row.tolist() if a >= 0] for row in rows]

    def close(self) -> None:
        """Leave the process group."""
        install_watch(None)
        if self.roll_call is not None:
            self.roll_call.close()
        dist.destroy_process_group()


def launched_rank() -> int:
    """The rank that a launcher gave this process; 0 without one."""
    return int(os.environ.get("RANK", "0"))


def launched_world() -> int:
    """The number of ranks that a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def start(timeout_seconds: float) -> Runtime:
    """Join the process group that torchrun describes, or be one of one rank.

    CUDA ranks take the device of their LOCAL_RANK and use NCCL for it, and gloo on the host.
    """
    rank, world = launched_rank(), launched_world()
    cuda = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if cuda and local_rank >= torch.cuda.device_count():
        raise InputError(
            f"ranks on this machine must be at most its CUDA devices "
            f"({torch.cuda.device_count()}); this is local rank {local_rank}"
        )
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        keep_freed_memory()
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
    control = dist.new_group(backend="gloo", timeout=_CONTROL_TIMEOUT)
    assert isinstance(control, dist.ProcessGroup)
    token = torch.tensor(secrets.randbits(62), dtype=torch.int64)
    dist.broadcast(token, 0, group=control)
    watch = Watch()
    install_watch(watch)
    roll_call = RollCall.start(rank, world, watch, timeout_seconds)
    return Runtime(rank, world, device, control, f"{int(token):016x}", watch, roll_call)
