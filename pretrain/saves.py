"""A run's checkpoints while it trains: where to, when, and what has become of them."""

from __future__ import annotations

import hashlib
import os
import tempfile
from ipaddress import IPv4Address
from pathlib import Path

import ckpt
from ckpt import CheckpointError, Event, Saver, Tier, address_towards
from pretrain.checkpoint import checkpoint_arrays, save_info
from pretrain.errors import InputError
from pretrain.interval import History, SaveClock
from pretrain.job import Job
from pretrain.log import RunLog, complain, say
from pretrain.metrics import Metrics
from pretrain.runtime import Runtime, StopRequest
from pretrain.spec import JobSpec
from pretrain.state import Progress

_FAILURES_IN_A_ROW = 3  # until a tier is said to be out of order


def tiers_of(spec: JobSpec, runtime: Runtime) -> list[Tier]:
    """Where this rank's checkpoints go, the fastest first."""
    config, tiers = spec.checkpoint, []
    node, ranks = _node_of(runtime)
    if config.memory:
        folder = f"convoy-{_name_of(spec)}-node{node}"
        tiers.append(
            Tier(
                name="memory",
                location=str(Path(config.memory_path) / folder),
                ranks=ranks,
                keep=1,
                volatile=True,
            )
        )
    if config.local_path is not None:
        folder = f"{config.local_path}/{spec.name}-{_name_of(spec)}-node{node}"
        tiers.append(Tier(name="local", location=folder, ranks=ranks, keep=config.keep))
    shared = str(spec.checkpoint_path)
    return [*tiers, Tier(name="shared", location=shared, keep=config.retention)]


def _node_of(runtime: Runtime) -> tuple[int, tuple[int, ...]]:
    """This rank's node, and the ranks on it."""
    size = runtime.ranks_per_node
    node = runtime.rank // size
    return node, tuple(range(node * size, min((node + 1) * size, runtime.world)))


def _name_of(spec: JobSpec) -> str:
    """Of the run on this machine: that of its checkpoint folder."""
    path = spec.checkpoint_path
    path = str(path.resolve()) if isinstance(path, Path) else path
    return hashlib.sha256(path.encode()).hexdigest()[:16]


def start_saver(job: Job, key: str) -> Saver:
    """This rank's saver. Keepers that an earlier start has left end first. ``key`` is one of this
    launch alone."""
    spec, runtime = job.spec, job.runtime
    node, ranks = _node_of(runtime)
    serves = None
    if spec.checkpoint.peer:
        if runtime.world <= runtime.ranks_per_node:
            raise InputError("checkpoint.peer (true) must be false on one node: it has no other")
        if runtime.rank == ranks[0]:
            name = f"convoy-{_name_of(spec)}-node{node}-peers"
            serves = str(Path(spec.checkpoint.memory_path) / name)
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
    lock = folder / f"convoy-{_name_of(spec)}-{runtime.rank}.lock"
    return Saver(
        tiers_of(spec, runtime),
        runtime.rank,
        lock,
        compression=spec.checkpoint.compression,
        serves=serves,
        key=key,
        linger_seconds=spec.checkpoint.linger_seconds,
    )


def join_peers(job: Job, saver: Saver, port: int, key: str) -> None:
    """Add the next node's memory to the tiers, where the spec says so; every rank must call.

    ``port`` is what this rank's keeper serves, or 0.
    """
    runtime, size = job.runtime, job.runtime.ranks_per_node
    if not job.spec.checkpoint.peer:
        return
    host = IPv4Address(address_towards(os.environ.get("MASTER_ADDR", "127.0.0.1")))
    served = runtime.gather_pairs([(int(host), port)])
    (node, ranks), nodes = _node_of(runtime), -(-runtime.world // size)
    ((address, port),) = served[(node + 1) % nodes * size]
    location = f"peer://{key}@{IPv4Address(address)}:{port}/node{node}"
    runtime.together(lambda: saver.add(Tier(name="peer", location=location, ranks=ranks, keep=1)))


class Saves:
    """Asks for saves when they are due, and tells what became of them."""

    def __init__(
        self,
        job: Job,
        saver: Saver,
        stop: StopRequest,
        log: RunLog,
        metrics: Metrics,
        history: History,
        restored: int,
        shared_step: int,
    ) -> None:
        self.job, self.saver, self.stop = job, saver, stop
        self.log, self.metrics = log, metrics
        self.clock = SaveClock(job.spec.checkpoint, job.runtime.world, history)
        self.count = 0
        self.shared = shared_step
        """The newest step that the shared tier has, or was given."""
        self.restored = self.newest = restored
        """The step that the run began after, and the newest that was saved since."""
        self._failed: dict[str, int] = {}
        self._error = ""

    @property
    def requested(self) -> bool:
        """What this rank brings to the barrier: whether to save after this step."""
        return self.stop.save_requested or (self.job.runtime.is_first and self.clock.is_time())

    def save(self, progress: Progress, last: bool) -> None:
        """Begin a checkpoint; every rank must call. The ``last`` of a run goes to all tiers."""
        job, every = self.job, self.job.spec.checkpoint.shared_every
        self.stop.save_requested = False
        self.count += 1
        # A resume from nodes' tiers alone is first made safe.
        due = last or self.count % every == 0 or (self.count == 1 and self.restored > self.shared)
        names = [
            tier.name
            for tier in self.saver.tiers
            if (due if tier.name == "shared" else progress.step > self.newest)
        ]
        self.newest = progress.step
        if due:
            self.shared = progress.step
        try:
            stall = self.saver.save(save_info(job, progress), checkpoint_arrays(job), names)
        except CheckpointError as error:
            stall = self.clock.stall_seconds  # it says nothing of what a save costs
            self._tell_failure(Event(what="failed", tier="shared", step=progress.step), str(error))
        self.clock.saved(stall)
        self.metrics.record_stall(stall)
        self.log.write("save", step=progress.step, stall_seconds=stall, tiers=names)
        if self.job.spec.checkpoint.interval_steps == "auto":
            self.log.write(
                "save_interval",
                step=progress.step,
                seconds=self.clock.interval_seconds,
                stall_seconds=stall,
                failures=self.clock.history.failures,
                seconds_between_failures=self.clock.seconds_between_failures,
            )

    def poll(self) -> None:
        """Tell what has become of saves since the last look."""
        try:
            events = self.saver.poll()
        except CheckpointError as error:
            self._tell_failure(Event(what="failed", tier="shared"), str(error))
            return
        for event in events:
            self._tell(event)

    def finish(self, progress: Progress) -> None:
        """Wait for what was begun; every rank must call. A last step that nodes alone have is
        saved where all share it.

        Raises CheckpointError on every rank where the last one is not in the shared tier.
        """
        step = progress.step
        if step > self.shared:
            self.save(progress, last=True)
        try:
            for event in self.saver.wait():
                self._tell(event)
        except CheckpointError as error:
            self._tell_failure(Event(what="failed", tier="shared", step=step), str(error))
        runtime, spec = self.job.runtime, self.job.spec
        good = self._failed.get("shared", 0) == 0
        if not runtime.agree(good):
            why = self._error or "another rank could not write its part"
            raise CheckpointError(
                f"checkpoint of step {step} in {spec.checkpoint_path} is not saved: {why}"
            )

    def _tell(self, event: Event) -> None:
        assert event.tier is not None
        if event.what == "failed":
            self._tell_failure(event, event.error)
            return
        self._failed[event.tier] = 0
        self.clock.wrote(event.tier, event.write_seconds)
        if event.what != "committed" or not self.job.runtime.is_first:
            return
        self.metrics.record_save(event)
        where = next(tier.location for tier in self.saver.tiers if tier.name == event.tier)
        self.log.write(
            "checkpoint",
            step=event.step,
            tier=event.tier,
            seconds=event.seconds,
            write_seconds=event.write_seconds,
            bytes_written=event.bytes_written,
            bytes_linked=event.bytes_linked,
            retries=event.retries,
            path=ckpt.manifest_name(where, event.step),
        )
        if event.tier == "shared":
            say(f"checkpoint of step {event.step} committed in {event.seconds:.2f} s")

    def _tell_failure(self, event: Event, error: str) -> None:
        tier, runtime = event.tier or "shared", self.job.runtime
        self._error = error
        self._failed[tier] = self._failed.get(tier, 0) + 1
        self.log.write("checkpoint_failed", step=event.step, tier=tier, error=error)
        which = f"checkpoint of step {event.step}" if event.step >= 0 else "a checkpoint"
        complain(f"rank {runtime.rank}: {which} is not in tier {tier}: {error}")
        if self._failed[tier] == _FAILURES_IN_A_ROW:
            complain(
                f"rank {runtime.rank}: tier {tier} has failed {_FAILURES_IN_A_ROW} times in a row; "
                f"training goes on"
            )
