"""The run, from a spec to an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from ckpt import AsyncCheckpointer, CheckpointError
from corpus.manifest import record_manifest
from pretrain.checkpoint import (
    Checkpointer,
    CheckpointProgress,
    join_peers,
    launch_secret,
    newest_shared_step,
    restore,
    start_saver,
)
from pretrain.data import Corpus
from pretrain.elastic import ChosenLayout, stand_by, with_spares
from pretrain.errors import (
    EXIT_DONE,
    EXIT_LOST,
    EXIT_TRY_AGAIN,
    CorruptionError,
    HealthError,
    InputError,
    LostRankError,
)
from pretrain.job import Job, build_job
from pretrain.observe import (
    Console,
    Events,
    History,
    RankLost,
    RunDone,
    RunFailed,
    RunStopped,
    StatusFile,
    outcome_of,
    read_former,
)
from pretrain.parts.faults import faults_of
from pretrain.parts.rank_watch import flight_folder, watch_ranks
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
from pretrain.train.data_fetches import tell_of_failing_stores
from pretrain.train.evaluate import StoppedEvaluationError
from pretrain.train.finish import finish
from pretrain.train.notices import watch_notices
from pretrain.train.profile import StepProfiler, Window
from pretrain.train.sinks import log_path, open_console, open_sinks, serve_metrics
from pretrain.train.start_events import publish_launched, publish_started
from pretrain.train.trainer import Trainer

_LOCK_SECONDS = 60.0
"""Longer than a rank whose torchrun is gone takes to end."""


def run(
    spec: JobSpec,
    layout: ChosenLayout,
    status: StatusFile | None = None,
    *,
    plain: bool = False,
    profile: Window | None = None,
) -> int:
    """Pretrain as the spec says; returns the exit code.

    Args:
        spec: of the run.
        layout: of this start, see :func:`pretrain.elastic.launched_layout`.
        status: on rank 0, where the run's beginning and end are recorded.
        plain: print lines on a terminal too.
        profile: the first and the last step of a trace.

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
        runtime = start(spec.train.timeout_seconds, layout.topology.world)
        until.callback(runtime.close)
        spares = layout.spares if runtime.is_first else 0
        tell_spares = until.enter_context(with_spares(spares, runtime.launch_id))
        # The former start of an elastic run may still be ending on a machine that was lost.
        wait = _LOCK_SECONDS if spec.elastic.enabled else 0.0
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
    with _building(runtime):
        job = build_job(spec, runtime, events, layout.topology)
        runtime.start_parts.mark("build")
        corpora = (*job.corpora.sources, *job.corpora.validation)
        runtime.first(lambda: _record_manifests(spec.run_path, corpora))
        secret = launch_secret(runtime)
        writer = runtime.together(lambda: start_saver(spec, runtime, secret))
    ended = False
    try:
        with _building(runtime):
            port = runtime.together(writer.ready)
            join_peers(spec, runtime, writer, port=port, key=secret)
        runtime.start_parts.mark("writer")
        with ExitStack() as sinks:
            code = _train(job, stop, writer, sinks, layout, profile)
        ended = True
    finally:
        # A node keeps its copies of checkpoints, unless the shared store has all of them.
        writer.close() if ended else writer.leave()
    return code


def _train(
    job: Job,
    stop: StopRequest,
    writer: AsyncCheckpointer,
    sinks: ExitStack,
    layout: ChosenLayout,
    profile: Window | None,
) -> int:
    spec, runtime, events = job.spec, job.runtime, job.events
    former = read_former(log_path(spec)) if runtime.is_first else []
    opened = runtime.first(
        lambda: open_sinks(spec, job.topology, events, former=former, sinks=sinks)
    )
    registry, ledger = opened or (CollectorRegistry(), None)
    url = runtime.together(
        lambda: serve_metrics(spec, runtime, events, registry=registry, sinks=sinks)
    )
    trainer: Trainer | None = None
    with _failure_published(events, lambda: trainer):
        publish_launched(runtime, events)
        limit = spec.train.time_limit_seconds
        watch_notices(runtime, events, stop, limit_seconds=limit, former=former, until=sinks)
        progress = restore(job, writer.tiers)
        shared_step = max(0, newest_shared_step(runtime, spec.checkpoint_path))
        runtime.start_parts.mark("load")
        runtime.together(lambda: writer.prepare(job.topology, job.checkpoint_arrays()))
        runtime.start_parts.mark("staging")
        publish_started(job, progress, url, layout)
        checkpointer = Checkpointer(
            job,
            writer,
            stop=stop,
            history=History.of(former),
            progress=CheckpointProgress.after(progress.step, shared_step),
        )
        faults = faults_of(spec, runtime, events, writer.writer_process_id)
        sinks.callback(faults.close)
        profiler = StepProfiler.of_rank(profile, runtime, events, spec.run_path)
        sinks.callback(profiler.close)
        trainer = begun = Trainer(job, progress, checkpointer, faults, profiler)
        tell_of_failing_stores(job.corpora.cache, events, lambda: begun.progress.step)
        with _watched(spec, runtime, events, lambda: begun.progress.step):
            if trainer.train(stop):
                return _stopped(events, trainer.progress.step, trainer.stop_cause)
            try:
                finish(job, trainer.progress, ledger, stop)
            except StoppedEvaluationError as stopped:
                stop.is_final = stopped.cause > StopCause.SIGNAL
                return _stopped(events, trainer.progress.step, stopped.cause)
        events.publish(RunDone(step=trainer.progress.step))
    return EXIT_DONE


def _stopped(events: Events, step: int, cause: StopCause) -> int:
    """Publish that a rank was asked to stop; returns the exit code."""
    events.publish(RunStopped(step=step, cause=cause.label))
    return EXIT_TRY_AGAIN


def _record_manifests(run_path: Path, corpora: Sequence[Corpus]) -> None:
    try:
        for corpus in corpora:
            record_manifest(run_path, corpus.manifest)
    except OSError as error:
        raise InputError(f"run_dir ({run_path}) cannot be written: {error.strerror}") from None


@contextmanager
def _failure_published(events: Events, trainer: Callable[[], Trainer | None]) -> Iterator[None]:
    """Publish the error that ends the start."""
    try:
        yield
    except BaseException as error:
        state, _, reason = outcome_of(error)
        begun = trainer()
        step = 0 if begun is None else begun.progress.step
        events.publish(RunFailed(step=step, state=state, reason=reason))
        raise


@contextmanager
def _watched(
    spec: JobSpec, runtime: Runtime, events: Events, step: Callable[[], int]
) -> Iterator[None]:
    """Around the steps: this rank's heartbeat, and on rank 0 the watch over all heartbeats. Where a
    collective fails, say which, and who is not in it."""
    try:
        with watch_ranks(
            runtime,
            spec.detection,
            timeout_seconds=spec.train.timeout_seconds,
            run_path=spec.run_path,
            publish=events.publish,
        ):
            yield
    except (HealthError, CheckpointError, CorruptionError):
        raise
    except RuntimeError as error:
        _raise_unless_lost(runtime, error)
        waited = runtime.comm_monitor.waited_seconds
        events.publish(RankLost(step=step(), waited_seconds=waited))
        reported = _reported(runtime, error)
        folder = flight_folder(spec.run_path, runtime.launch_id)
        hint = f"convoy inspect flight {folder} shows where ranks disagree"
        raise LostRankError(f"after step {step()}, {reported}; {hint}") from error


@contextmanager
def _building(runtime: Runtime) -> Iterator[None]:
    """Where a rank does not build what all ranks build, say which."""
    try:
        with runtime.building():
            yield
    except CheckpointError:
        raise
    except RuntimeError as error:
        _raise_unless_lost(runtime, error)
        raise LostRankError(f"before the first step, {_reported(runtime, error)}") from error


def _raise_unless_lost(runtime: Runtime, error: RuntimeError) -> None:
    """Raise an error that comes from no collective."""
    if runtime.hang_report is None or not runtime.hang_report.is_lost(error):
        raise error


def _reported(runtime: Runtime, error: RuntimeError) -> str:
    """What the hang report says of a failed collective; raises SystemExit where another rank says
    it already."""
    assert runtime.hang_report is not None
    text = runtime.hang_report.report(error)
    if text is None:
        raise SystemExit(EXIT_LOST) from None
    return text
