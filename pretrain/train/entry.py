"""The run, from a spec to an exit code."""

from __future__ import annotations

from contextlib import ExitStack

from pretrain.checkpoint import (
    join_peers,
    launch_secret,
    restore,
    start_saver,
)
from pretrain.elastic import ChosenLayout, Seat, stand_by, with_spares
from pretrain.errors import (
    EXIT_TRY_AGAIN,
)
from pretrain.job import build_job
from pretrain.observe import (
    Console,
    Events,
    StatusFile,
)
from pretrain.runtime import (
    Runtime,
    StopCause,
    StopRequest,
    end_with_torchrun,
    launched_rank,
    lock_run,
    start,
    stop_torchrun,
)
from pretrain.spec import JobSpec
from pretrain.train.epochs import run_epochs
from pretrain.train.profile import Window
from pretrain.train.sinks import open_console
from pretrain.train.training import LOCK_SECONDS, building, open_run, record_manifests, train_job


def run(
    spec: JobSpec,
    layout: ChosenLayout,
    status: StatusFile | None = None,
    *,
    plain: bool = False,
    profile: Window | None = None,
    seat: Seat | None = None,
) -> int:
    """Pretrain as the spec says; returns the exit code.

    Args:
        spec: of the run.
        layout: of this start, see :func:`pretrain.elastic.launched_layout`.
        status: on rank 0, where the run's beginning and end are recorded.
        plain: print lines on a terminal too.
        profile: the first and the last step of a trace.
        seat: where this process stands in a launch whose replicas leave and come back.

    Raises:
        InputError, CheckpointError: nothing can be done with this spec, data or checkpoint.
        HealthError: a rule of ``[health]`` stopped the run.
        CorruptionError: ranks have other numbers than they must have, see ``[verify]``.
    """
    stop = StopRequest()
    torchrun = end_with_torchrun()
    with ExitStack() as until:
        until.callback(stop.restore)
        if launched_rank() >= layout.topology.world:
            return stand_by(stop)
        if seat is not None:
            return run_epochs(spec, seat, stop, layout, plain=plain, profile=profile)
        runtime = start(spec.train.timeout_seconds, layout.topology.world)
        until.callback(runtime.close)
        spares = layout.spares if runtime.is_first else 0
        tell_spares = until.enter_context(with_spares(spares, runtime.launch_id))
        # The former start of an elastic run may still be ending on a machine that was lost.
        wait = LOCK_SECONDS if spec.elastic.enabled else 0.0
        runtime.first(lambda: until.enter_context(lock_run(spec, wait)))
        if status is not None:
            until.enter_context(status.during(spec.checkpoint_path))
        console = open_console(spec.train.steps, runtime, plain=plain)
        until.callback(console.close)
        code = _run(spec, runtime, stop, layout, console, profile)
        if status is not None:
            status.end(code)
        tell_spares(code)
        # A notice is of one machine: the others of an elastic run go on without that machine.
        of_machine = spec.elastic.enabled and stop.cause <= StopCause.SIGNAL
        leaves = stop.is_final and (stop.ends_launch or not of_machine)
    if code == EXIT_TRY_AGAIN and leaves:
        stop_torchrun(torchrun)
    return code


def _run(
    spec: JobSpec,
    runtime: Runtime,
    stop: StopRequest,
    layout: ChosenLayout,
    console: Console,
    profile: Window | None,
) -> int:
    events = Events(console)
    with building(runtime):
        job = build_job(spec, runtime, events, layout.topology)
        runtime.start_parts.mark("build")
        corpora = (*job.corpora.sources, *job.corpora.validation)
        runtime.first(lambda: record_manifests(spec.run_path, corpora))
        secret = launch_secret(runtime)
        writer = runtime.together(lambda: start_saver(spec, runtime, secret))
    ended = False
    try:
        with building(runtime):
            port = runtime.together(writer.ready)
            join_peers(spec, runtime, writer, port=port, key=secret)
        runtime.start_parts.mark("writer")
        with ExitStack() as sinks:
            opened = open_run(spec, runtime, job.topology, events, sinks)
            code = train_job(
                job,
                stop,
                writer,
                sinks,
                layout,
                profile,
                opened,
                lambda: restore(job, writer.tiers),
            )
        ended = True
    finally:
        # A node keeps its copies of checkpoints, unless the shared store has all of them.
        writer.close() if ended else writer.leave()
    return code
