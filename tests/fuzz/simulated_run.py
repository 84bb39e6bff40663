"""The ranks of a run, simulated: the trainer's own code, without a model, processes or a clock.

Each rank is a real :class:`pretrain.train.trainer.Trainer` with a real loader, health watch,
stragglers part, and checkpointer, and restores by :func:`pretrain.checkpoint.restore`. Simulated
are the forward and backward, the exchange at the step barrier, the optimizer (it counts its
updates), and the writer process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

import ckpt
from ckpt import LocalArray, SaveEvent, SaveInfo
from parallel import Topology
from pretrain.checkpoint import Checkpointer, CheckpointProgress, restore
from pretrain.data import Loader
from pretrain.data.order import GlobalOrder
from pretrain.elastic import Standing
from pretrain.job import Job
from pretrain.job.build import _context, _division
from pretrain.observe import History
from pretrain.parts.stragglers import StragglersPart
from pretrain.runtime import StopCause
from pretrain.spec import JobSpec
from pretrain.state import Progress
from pretrain.train.attempt import Attempt
from pretrain.train.health_watch import HealthWatch
from pretrain.train.trainer import Trainer

SEQUENCES = 97
"""Of the simulated corpus: an epoch ends within most runs."""
BLOCK = 32
"""Samples that are looked up together: a run crosses the ends of many blocks."""
WEIGHT = ckpt.ArraySpec("model/w", (6,), torch.float32, (("fsdp",),))


class Pause(BaseException):
    """The ranks have taken the step that was asked for."""


class Numbers:
    """Sequences whose tokens are their own numbers."""

    seq_len = 8

    def __len__(self) -> int:
        return SEQUENCES

    def read(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        return np.repeat(np.asarray(indices, np.int64)[:, None], self.seq_len + 1, axis=1)


class AtOnce:
    """An executor that does its work when asked, in the thread that asks."""

    def __init__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)
        return future


class Optimizer:
    """Counts its updates in the weight."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)
        self.param_groups = [{"lr": 0.0}]
        self.state: dict[Any, Any] = {}

    def zero_grad(self) -> None:
        pass

    def step(self) -> None:
        self.weight += 1


@dataclass
class Answers:
    """What rank 0 has answered, for the ranks that are simulated after it."""

    values: list[Any] = field(default_factory=list)


class SimulatedRuntime:
    """A rank among others, which act one after the other."""

    def __init__(self, rank: int, world: int, launch_id: str, machines: Sequence[str],
                 answers: Answers) -> None:  # fmt: skip
        self.rank, self.world, self.launch_id, self.answers = rank, world, launch_id, answers
        self.machines, self.taken = machines, 0
        self.device = torch.device("cpu")
        self.is_first = rank == 0
        self.heartbeat = SimpleNamespace(beat=lambda *_: None)
        self.comm_monitor = SimpleNamespace(take=dict, exposed_seconds=0.0, time_cuda=False)
        self.ranks_per_node = 2

    def from_first(self, act: Callable[[], int]) -> int:
        """Rank 0's answer, on every rank."""
        if self.is_first:
            self.answers.values.append(act())
            return self.answers.values[-1]
        self.taken += 1
        return self.answers.values[self.taken - 1]

    def first(self, act: Callable[[], Any]) -> Any:
        """Only rank 0 acts."""
        return act() if self.is_first else None

    def together(self, act: Callable[[], Any]) -> Any:
        """Every rank acts."""
        return act()

    def agree(self, passed: bool) -> bool:
        """Rank 0's vote, on every rank: it alone learns what became of saves."""
        return bool(self.from_first(lambda: int(passed)))

    def gather_texts(self, text: str) -> list[str]:
        """The machines of all ranks: nothing else is asked for."""
        return list(self.machines)

    def gather_pairs(self, pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Every rank has what this one has."""
        return [list(pairs)] * self.world


@dataclass
class Request:
    """A save that was begun."""

    info: SaveInfo
    weight: float


class Writers:
    """The writer processes of all ranks: what they were given, until it lands or is lost."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.queue: list[Request] = []
        self.events: list[SaveEvent] = []

    def of_rank(self, rank: int, job: Any) -> Any:
        """One rank's side. Rank 0 speaks for all: all ranks have equal counters and weights."""
        if rank:
            return SimpleNamespace(
                tiers=[ckpt.Tier(name="shared", location=str(self.root))],
                save=lambda info, arrays, names: 0.0, poll=list, wait=list,
            )  # fmt: skip
        return SimpleNamespace(
            tiers=[ckpt.Tier(name="shared", location=str(self.root))],
            save=lambda info, arrays, names: self.take(info, float(job.optimizer.weight)),
            poll=self.poll,
            wait=self.wait,
        )

    def take(self, info: SaveInfo, weight: float) -> float:
        """Stage a save; the one before must land first."""
        while self.queue:
            self.land()
        self.queue.append(Request(info, weight))
        return 0.01

    def land(self) -> int:
        """Commit the oldest save; returns its step."""
        request = self.queue.pop(0)
        info, values = request.info, torch.full((6,), request.weight)
        # The rank that commits comes last: all receipts are there.
        for rank in [*range(1, info.topology.world), 0]:
            boxes = WEIGHT.layout(info.topology).boxes(rank)
            local = [values[slice(*box[0])].clone() for box in boxes]
            array = LocalArray(WEIGHT, boxes, local, stacked=False)
            ckpt.save(self.root, info, [array], rank, lambda passed: passed)
        self.events.append(SaveEvent(what="committed", tier="shared", step=info.step))
        return info.step

    def lose(self) -> None:
        """The oldest save fails."""
        request = self.queue.pop(0)
        self.events.append(
            SaveEvent(what="failed", tier="shared", step=request.info.step, error="a full disk")
        )

    def poll(self) -> list[SaveEvent]:
        """What has become of saves since the last call."""
        events, self.events = self.events, []
        return events

    def wait(self) -> list[SaveEvent]:
        """All that was begun lands."""
        while self.queue:
            self.land()
        return self.poll()


class Quiet:
    """Where the trainer tells what nobody here wants to know."""

    tokens = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class SimulatedTrainer(Trainer):
    """Takes the step that was read before, with reports that a simulation has exchanged."""

    def __init__(self, job: Any, progress: Progress, checkpointer: Checkpointer) -> None:
        quiet = Quiet()
        self.job, self.checkpointer, self.progress = job, checkpointer, progress
        self.profiler = self.faults = self.verifier = self.digests = self.interval = quiet  # type: ignore[assignment]
        self.watch = HealthWatch(job)
        self.first_step, self.flops_per_token, self.peak_flops = None, 1.0, 1.0
        self.skipped, self.starts_again = 0, False
        self.standing, self.wants_meeting = Standing(), lambda: False
        self.attempt = self.rows = self.committed = None
        self.stop_cause = StopCause.NONE
        self.steps_left = 0

    def step(self, stop_requested: int) -> Any:
        if not self.steps_left:
            raise Pause
        self.steps_left -= 1
        return super().step(stop_requested)

    def read(self) -> Attempt:
        """Read the step's data."""
        batches, cursor, planned = self._read_step(self.job.loader)
        self.attempt = Attempt(
            batches=batches, cursor=cursor, planned=planned, began=0.0, waited=0.0
        )
        return self.attempt

    def _read(self, before: Progress) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def _backward(self, attempt: Attempt, before: Progress) -> None:
        pass

    def _exchange(self, attempt: Attempt, stop_requested: int) -> None:
        assert self.rows is not None
        self.standing.turn += 1

    def _publish_commit(self, decision: Any, attempt: Attempt) -> None:
        pass


@dataclass
class Rank:
    """One simulated rank."""

    rank: int
    topology: Topology
    machine: str
    job: Any
    stop: Any
    trainer: SimulatedTrainer = None  # type: ignore[assignment]

    def begin(self, writers: Writers) -> None:
        """Restore, and make the trainer."""
        job = self.job
        progress = restore(job)
        self.job.runtime.taken = len(self.job.runtime.answers.values)
        checkpointer = Checkpointer(
            job,
            writers.of_rank(self.rank, job),
            stop=self.stop,
            history=History.of([]),
            progress=CheckpointProgress.after(progress.step, progress.step),
        )
        self.trainer = SimulatedTrainer(job, progress, checkpointer)


def make_rank(
    spec: JobSpec, topology: Topology, rank: int, machines: Sequence[str], answers: Answers,
    launch_id: str, publish: Callable[[Any], None], goes_on: Callable[[int], bool],
) -> Rank:  # fmt: skip
    """A rank of a start, whose values are not restored yet."""
    runtime = SimulatedRuntime(rank, topology.world, launch_id, machines, answers)
    events = SimpleNamespace(
        publish=publish if rank == 0 else lambda event: None, note=lambda *_, **__: None
    )
    sequences, optimizer = Numbers(), Optimizer()
    place = topology.place(rank)
    loader = Loader(
        sequences,
        GlobalOrder(SEQUENCES, spec.train.seed),
        partial(spec.batch.size_at, seq_len=spec.data.seq_len),
        spec.batch.micro_batch_size,
        topology.dp_rank(rank),
        topology.dp_replicate * topology.dp_shard,
    )
    loader.division = _division(spec, topology)
    context = _context(runtime, topology, events, spec.run_path, tuple(machines))  # type: ignore[arg-type]
    context = replace(context, goes_on_without=goes_on)
    stragglers = StragglersPart.of_spec(
        spec, context, timed=True, division=loader.division, capacity_follows_speed=False
    )
    source = SimpleNamespace(name="a", manifest=SimpleNamespace(fingerprint="f" * 64),
                             data=spec.data)  # fmt: skip

    def arrays() -> list[LocalArray]:
        boxes = WEIGHT.layout(topology).boxes(rank)
        rows = [optimizer.weight.expand(box[0][1] - box[0][0]).clone() for box in boxes]
        job.loaded = rows
        return [LocalArray(WEIGHT, boxes, rows, stacked=False)]

    job = SimpleNamespace(
        spec=spec, runtime=runtime, topology=topology, events=events, loader=loader,
        optimizer=optimizer, parts=(stragglers,), machines=tuple(machines), context=context,
        model=torch.nn.Linear(1, 1, bias=False), compressed=None, balance=None, routers=[],
        router_rows=[], moe_layers=[], arrays=arrays, residuals=list, checkpoint_arrays=list,
        dims=SimpleNamespace(reads_first=not (place.tp or place.cp or place.pp)),
        corpora=SimpleNamespace(fingerprint="f" * 64, tokenizer_fingerprint="t", sources=[source]),
        continue_blend=lambda blend, cursor: None, continue_step_counts=lambda progress: progress,
        grad_square_sum=lambda: 0.01, loaded=[],
    )  # fmt: skip
    job.act = partial(Job.act, job)
    stop = SimpleNamespace(cause=StopCause.NONE, save_requested=False, is_final=False,
                           ends_launch=False)  # fmt: skip
    return Rank(rank, topology, machines[rank], job, stop)


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """What of the product's code a simulated rank has not: random states, weights, threads, git."""
    with contextlib.ExitStack() as stack:
        for name, value in {
            "pretrain.checkpoint.resume.rng_arrays": lambda *_: [],
            "pretrain.checkpoint.resume.rng_states": lambda *_: {},
            "pretrain.checkpoint.resume.set_rng_states": lambda *_: None,
            "pretrain.checkpoint.resume.seed_rng": lambda *_: None,
            "pretrain.train.trainer.rng_states": lambda *_: {},
            "pretrain.train.trainer.set_rng_states": lambda *_: None,
            "pretrain.checkpoint.resume.initialize": lambda job: Progress(),
            "pretrain.checkpoint.contents.code_version": lambda: "",
            "pretrain.data.loader.ThreadPoolExecutor": AtOnce,
            "pretrain.data.order._BLOCK": BLOCK,
            "ckpt.store.local.LocalStore.sync": lambda store, keys: None,
        }.items():
            stack.enter_context(mock.patch(name, value))
        yield
