"""The run of a process whose replica may be left alone, and goes on then."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial

from parallel import Topology
from parallel.crossing import RegroupError
from pretrain.data import Corpora
from pretrain.elastic import ChosenLayout, Membership, Seat
from pretrain.errors import (
    EXIT_TRY_AGAIN,
)
from pretrain.job import build
from pretrain.observe import (
    Events,
    StatusFile,
)
from pretrain.runtime import (
    Runtime,
    StopCause,
    StopRequest,
    backend_of,
    launched_rank,
    lock_run,
    rank_device,
    start_replica,
    stop_torchrun,
    torchrun_process,
)
from pretrain.spec import JobSpec
from pretrain.train.healing import (
    Carried,
    InEpoch,
    begin_epoch,
    epoch_job,
    epoch_runtime,
    epoch_writer,
    errors_end_epochs,
)
from pretrain.train.profile import Window
from pretrain.train.sinks import open_console
from pretrain.train.training import LOCK_SECONDS, Opened, open_run, record_manifests, train_job


def run_epochs(
    spec: JobSpec,
    seat: Seat,
    stop: StopRequest,
    layout: ChosenLayout,
    *,
    plain: bool,
    profile: Window | None,
) -> int:
    """The run of a process whose replica may be left alone, and goes on then."""
    torchrun, device = torchrun_process(), rank_device()
    timeout = timedelta(seconds=spec.train.timeout_seconds)
    members = Membership(seat, layout.topology, launched_rank(), device=device, timeout=timeout)
    with ExitStack() as until:
        until.callback(members.close)
        members.join_replica(backend_of(device))
        replica = start_replica(
            spec.train.timeout_seconds, members.index, members.ranks, device=device
        )
        built = build(spec, replica, layout.topology)
        replica.start_parts.mark("build")
        carried, duties = Carried(), FirstRank(spec, until, plain=plain)
        while True:
            epoch = members.next()
            runtime = epoch_runtime(members, epoch, replica)
            with ExitStack() as during, suppress(RegroupError):
                during.callback(carried.end)
                with errors_end_epochs(members):
                    duties.take(runtime)
                    writer = epoch_writer(members, spec, runtime, carried)
                    job = epoch_job(members, built, runtime, duties.events, carried)
                    opened = duties.open(runtime, members.topology, built.corpora)
                    within = InEpoch(members, epoch, carried, job)
                    begin = partial(begin_epoch, within)
                    code = train_job(
                        job, stop, writer, during, layout, profile, opened, begin, within
                    )
                    break
        writer.close()
        members.journal.end(code)
        duties.end(code)
    runtime.close()
    leaves = stop.is_final and (stop.ends_launch or stop.cause > StopCause.SIGNAL)
    if code == EXIT_TRY_AGAIN and leaves:
        stop_torchrun(torchrun)
    return code


class FirstRank:
    """What rank 0 does for the run: console, log, metrics, status and lock. Another process does it
    where the replica of rank 0 has left."""

    def __init__(self, spec: JobSpec, until: ExitStack, *, plain: bool) -> None:
        self.spec, self.until, self.plain = spec, until, plain
        self.events = Events()
        self.status: StatusFile | None = None
        self.is_first: bool | None = None
        self.opened: Opened | None = None

    def take(self, runtime: Runtime) -> None:
        """Begin an epoch as one of its ranks."""
        if self.is_first == runtime.is_first:
            return
        self.is_first, self.opened = runtime.is_first, None
        console = open_console(self.spec.train.steps, runtime, plain=self.plain)
        self.until.callback(console.close)
        self.events = Events(console)
        if runtime.is_first:
            self.until.enter_context(lock_run(self.spec, LOCK_SECONDS))
            self.status = StatusFile(self.spec.run_path, runtime.world)
            self.until.enter_context(self.status.during(self.spec.checkpoint_path))

    def open(self, runtime: Runtime, topology: Topology, corpora: Corpora) -> Opened:
        """The sinks of this process."""
        if self.opened is None:
            spec, events = self.spec, self.events
            if runtime.is_first:
                record_manifests(spec.run_path, (*corpora.sources, *corpora.validation))
            self.opened = open_run(spec, runtime, topology, events, self.until, alone=True)
        return self.opened

    def end(self, code: int) -> None:
        """The run has ended."""
        if self.status is not None:
            self.status.end(code)
