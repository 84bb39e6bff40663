"""The training of a job that is built: from its first values to its last step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from ckpt import AsyncCheckpointer, CheckpointError
from corpus.manifest import record_manifest
from parallel import Topology
from parallel.crossing import RegroupError, installed_crossing
from pretrain.checkpoint import (
    Checkpointer,
    CheckpointProgress,
    newest_shared_step,
)
from pretrain.data import Corpus
from pretrain.elastic import ChosenLayout
from pretrain.errors import (
    EXIT_DONE,
    EXIT_LOST,
    EXIT_TRY_AGAIN,
    CorruptionError,
    HealthError,
    InputError,
    LostRankError,
)
from pretrain.job import Job
from pretrain.observe import (
    Events,
    History,
    LiveLedger,
    LoggedEvent,
    RankLost,
    RunDone,
    RunFailed,
    RunStopped,
    outcome_of,
    read_former,
)
from pretrain.parts.faults import faults_of
from pretrain.parts.rank_watch import flight_folder, watch_ranks
from pretrain.runtime import (
    Runtime,
    StopCause,
    StopRequest,
)
from pretrain.spec import JobSpec
from pretrain.state import Progress
from pretrain.train.data_fetches import tell_of_failing_stores
from pretrain.train.evaluate import StoppedEvaluationError
from pretrain.train.finish import finish
from pretrain.train.healing import InEpoch, is_lost
from pretrain.train.notices import watch_notices
from pretrain.train.profile import StepProfiler, Window
from pretrain.train.sinks import log_path, open_sinks, serve_metrics
from pretrain.train.start_events import publish_launched, publish_started
from pretrain.train.trainer import Trainer

LOCK_SECONDS = 60.0
"""Longer than a rank whose torchrun is gone takes to end."""


@dataclass(frozen=True)
class Opened:
    """What was opened to see the events of a run on this rank."""

    former: list[LoggedEvent]
    """The log of before, on rank 0."""
    ledger: LiveLedger | None
    url: str | None
    """Where this rank's metrics are served."""


def open_run(
    spec: JobSpec,
    runtime: Runtime,
    topology: Topology,
    events: Events,
    sinks: ExitStack,
    *,
    alone: bool = False,
) -> Opened:
    """Open what sees the events; every rank must call, unless ``alone``.

    Raises InputError on every rank, or alone on this one, where something cannot be opened.
    """
    former = read_former(log_path(spec)) if runtime.is_first else []

    def open_both() -> Opened:
        registry, ledger = CollectorRegistry(), None
        if runtime.is_first:
            registry, ledger = open_sinks(spec, topology, events, former=former, sinks=sinks)
        url = serve_metrics(spec, runtime, events, registry=registry, sinks=sinks)
        return Opened(former, ledger, url)

    return open_both() if alone else runtime.together(open_both)


def record_manifests(run_path: Path, corpora: Sequence[Corpus]) -> None:
    """Note the manifests of a run's corpora in its folder; for rank 0.

    Raises InputError where the folder cannot be written.
    """
    try:
        for corpus in corpora:
            record_manifest(run_path, corpus.manifest)
    except OSError as error:
        raise InputError(f"run_dir ({run_path}) cannot be written: {error.strerror}") from None


def train_job(
    job: Job,
    stop: StopRequest,
    writer: AsyncCheckpointer,
    sinks: ExitStack,
    layout: ChosenLayout,
    profile: Window | None,
    opened: Opened,
    begin: Callable[[], Progress],
    within: InEpoch | None = None,
) -> int:
    """Train a job that is built to its last step, or until a rank is asked to stop.

    Args:
        job: model, optimizer and data.
        stop: the requests of this rank.
        writer: the trainer's side of this rank's writer process.
        sinks: closed when the job's training ends.
        layout: of this start.
        profile: the first and the last step of a trace.
        opened: what sees the events.
        begin: gives the job its values, and returns its counters.
        within: the epoch, where replicas leave and come back.

    Returns the exit code. Raises RegroupError where the epoch is over first.
    """
    spec, runtime, events = job.spec, job.runtime, job.events
    former, ledger, url = opened.former, opened.ledger, opened.url
    trainer: Trainer | None = None
    with _failure_published(events, lambda: trainer):
        begins = within is None or within.begins_run
        if begins:
            publish_launched(runtime, events)
        limit = spec.train.time_limit_seconds
        watch_notices(runtime, events, stop, limit_seconds=limit, former=former, until=sinks)
        progress = begin()
        shared_step = max(0, newest_shared_step(runtime, spec.checkpoint_path))
        runtime.start_parts.mark("load")
        if within is None:
            runtime.together(lambda: writer.prepare(job.topology, job.checkpoint_arrays()))
        runtime.start_parts.mark("staging")
        if begins:
            publish_started(job, progress, url, layout)
        checkpointer = Checkpointer(
            job,
            writer,
            stop=stop,
            history=History.of(former),
            # A save that the end of an epoch broke off is begun again.
            progress=CheckpointProgress.after(
                progress.step if begins else shared_step, shared_step
            ),
        )
        faults = faults_of(spec, runtime, events, writer.writer_process_id)
        sinks.callback(faults.close)
        profiler = StepProfiler.of_rank(profile, runtime, events, spec.run_path)
        sinks.callback(profiler.close)
        trainer = begun = Trainer(
            job,
            progress,
            checkpointer,
            faults,
            profiler,
            standing=None if within is None else within.members.standing,
            wants_meeting=lambda: within is not None and within.members.wants_meeting,
        )
        if within is not None:
            within.carried.trainer = begun
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


@contextmanager
def _failure_published(events: Events, trainer: Callable[[], Trainer | None]) -> Iterator[None]:
    """Publish the error that ends the start."""
    try:
        yield
    except RegroupError:
        raise
    except BaseException as error:
        if installed_crossing() is not None and is_lost(error):
            raise
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
def building(runtime: Runtime) -> Iterator[None]:
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
    if (
        runtime.hang_report is None
        or isinstance(error, RegroupError)
        or not runtime.hang_report.is_lost(error)
    ):
        raise error


def _reported(runtime: Runtime, error: RuntimeError) -> str:
    """What the hang report says of a failed collective; raises SystemExit where another rank says
    it already."""
    assert runtime.hang_report is not None
    text = runtime.hang_report.report(error)
    if text is None:
        raise SystemExit(EXIT_LOST) from None
    return text
