"""The run, from a spec to an exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

import ckpt
from ckpt import AsyncCheckpointer, CheckpointError
from corpus.manifest import record_manifest
from corpus.tokenizer import load_tokenizer
from pretrain.checkpoint import (
    Checkpointer,
    CheckpointProgress,
    checkpoint_arrays,
    join_peers,
    launch_secret,
    newest_shared_step,
    restore,
    start_saver,
)
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
    DataOpened,
    Evaluated,
    Events,
    History,
    Launched,
    LiveLedger,
    Notice,
    RankLost,
    RunDone,
    RunFailed,
    RunStarted,
    RunStopped,
    StatusFile,
    Summary,
    experiment_record,
    outcome_of,
    read_former,
    show_summary,
    summed,
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
    peak_memory_bytes,
    start,
    stop_torchrun,
)
from pretrain.spec import JobSpec
from pretrain.state import Progress
from pretrain.train.data_fetches import tell_of_failing_stores
from pretrain.train.evaluate import StoppedEvaluationError, evaluate, evaluated_moe_layers
from pretrain.train.generation import generate
from pretrain.train.notices import watch_notices
from pretrain.train.profile import StepProfiler, Window
from pretrain.train.sinks import open_console, open_sinks, serve_metrics
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
    with ExitStack() as held:
        held.callback(stop.restore)
        if launched_rank() >= layout.topology.world:
            return stand_by(stop)
        runtime = start(spec.train.timeout_seconds, layout.topology.world)
        held.callback(runtime.close)
        spares = layout.spares if runtime.is_first else 0
        tell_spares = held.enter_context(with_spares(spares, runtime.launch_id))
        # The former start of an elastic run may still be ending on a machine that was lost.
        wait = _LOCK_SECONDS if spec.elastic.enabled else 0.0
        runtime.first(lambda: held.enter_context(lock_run(spec, wait)))
        if status is not None:
            held.enter_context(status.during(spec.checkpoint_path))
        console = open_console(spec.train.steps, runtime, plain=plain)
        held.callback(console.close)
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
        runtime.first(lambda: _record_manifests(job))
        secret = launch_secret(runtime)
        writer = runtime.together(lambda: start_saver(job, secret))
    ended = False
    try:
        with _building(runtime):
            join_peers(job, writer, runtime.together(writer.ready), secret)
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
    runtime, path = job.runtime, job.spec.run_path / "log.jsonl"
    former = read_former(path) if runtime.is_first else []
    opened = runtime.first(lambda: open_sinks(job, path, former, sinks))
    registry, ledger = opened or (CollectorRegistry(), None)
    url = runtime.together(lambda: serve_metrics(job, registry, sinks))
    trainer: Trainer | None = None
    with _failure_published(job, lambda: trainer):
        job.events.publish(_launched(job))
        watch_notices(job, stop, former=former, held=sinks)
        progress = restore(job, writer.tiers)
        checkpoints = CheckpointProgress.after(progress.step, max(0, newest_shared_step(job)))
        runtime.start_parts.mark("load")
        runtime.together(lambda: writer.prepare(job.topology, checkpoint_arrays(job)))
        runtime.start_parts.mark("staging")
        job.events.publish(_data_opened(job, progress))
        job.events.publish(_started(job, progress, url, layout))
        checkpointer = Checkpointer(
            job, writer, stop=stop, history=History.of(former), progress=checkpoints
        )
        faults = faults_of(job.spec, runtime, job.events, writer.writer_process_id)
        sinks.callback(faults.close)
        profiler = StepProfiler.of_job(job, profile)
        sinks.callback(profiler.close)
        trainer = Trainer(job, progress, checkpointer, faults, profiler)
        begun = trainer
        tell_of_failing_stores(job, lambda: begun.progress.step)
        with _watched(job, trainer), _heartbeats(job):
            if trainer.train(stop):
                return _stopped(job, trainer.progress.step, trainer.stop_cause)
            try:
                _finish(job, trainer.progress, ledger, stop)
            except StoppedEvaluationError as stopped:
                stop.is_final = stopped.cause > StopCause.SIGNAL
                return _stopped(job, trainer.progress.step, stopped.cause)
        job.events.publish(RunDone(step=trainer.progress.step))
    return EXIT_DONE


def _stopped(job: Job, step: int, cause: StopCause) -> int:
    """Publish that a rank was asked to stop; returns the exit code."""
    job.events.publish(RunStopped(step=step, cause=cause.label))
    return EXIT_TRY_AGAIN


def _record_manifests(job: Job) -> None:
    try:
        for one in (*job.corpora.sources, *job.corpora.validation):
            record_manifest(job.spec.run_path, one.manifest)
    except OSError as error:
        raise InputError(
            f"run_dir ({job.spec.run_path}) cannot be written: {error.strerror}"
        ) from None


def _launched(job: Job) -> Launched:
    runtime = job.runtime
    return Launched(
        step=0,
        process_start=runtime.start_parts.began,
        launch_id=runtime.launch_id,
        world_size=runtime.world,
        start_seconds=runtime.start_parts.seconds,
    )


@contextmanager
def _failure_published(job: Job, trainer: Callable[[], Trainer | None]) -> Iterator[None]:
    """Publish the error that ends the start."""
    try:
        yield
    except BaseException as error:
        state, _, reason = outcome_of(error)
        at = trainer()
        step = 0 if at is None else at.progress.step
        job.events.publish(RunFailed(step=step, state=state, reason=reason))
        raise


def _data_opened(job: Job, progress: Progress) -> DataOpened:
    assert job.loader.blend is not None
    return DataOpened(
        step=progress.step,
        sample=progress.consumed_samples,
        seed=job.spec.train.seed,
        seq_len=job.spec.data.seq_len,
        sources=job.corpora.described(),
        blend=job.loader.blend.as_json(),
    )


def _started(job: Job, progress: Progress, url: str | None, layout: ChosenLayout) -> RunStarted:
    spec, runtime = job.spec, job.runtime
    return RunStarted(
        step=progress.step,
        job=spec.name,
        spec_hash=spec.hash,
        world_size=runtime.world,
        topology=job.topology.as_dict(),
        layout=job.topology.describe(),
        parameters=sum(p.numel() for p in job.parallel_model.meta_model.parameters()),
        steps=spec.train.steps,
        step_tokens=spec.global_batch_tokens,
        device=runtime.device.type,
        launch_id=runtime.launch_id,
        metrics_url=url,
        topology_epoch=progress.topology_epoch,
        spares=layout.spares,
        layout_reason="" if layout.reason == ChosenLayout.reason else layout.reason,
        start_seconds=runtime.start_parts.seconds,
        record=(
            experiment_record(corpus=job.corpora.fingerprint, run_id=progress.run_id)
            if runtime.is_first
            else {}
        ),
        spec=spec.as_dict(),
    )


def _heartbeats(job: Job) -> AbstractContextManager[None]:
    """This rank's heartbeat, and on rank 0 the watch over all heartbeats."""
    return watch_ranks(
        job.runtime,
        job.spec.detection,
        timeout_seconds=job.spec.train.timeout_seconds,
        run_path=job.spec.run_path,
        publish=job.events.publish,
    )


@contextmanager
def _watched(job: Job, trainer: Trainer) -> Iterator[None]:
    """Where a collective fails, say which, and who is not in it."""
    try:
        yield
    except (HealthError, CheckpointError, CorruptionError):
        raise
    except RuntimeError as error:
        _raise_unless_lost(job.runtime, error)
        waited = job.runtime.comm_monitor.waited_seconds
        job.events.publish(RankLost(step=trainer.progress.step, waited_seconds=waited))
        told = _told(job.runtime, error)
        folder = flight_folder(job.spec.run_path, job.runtime.launch_id)
        hint = f"convoy inspect flight {folder} shows where ranks disagree"
        raise LostRankError(f"after step {trainer.progress.step}, {told}; {hint}") from error


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
        raise LostRankError(f"before the first step, {_told(runtime, error)}") from error


def _raise_unless_lost(runtime: Runtime, error: RuntimeError) -> None:
    """Raise an error that comes from no collective."""
    if runtime.hang_report is None or not runtime.hang_report.is_lost(error):
        raise error


def _told(runtime: Runtime, error: RuntimeError) -> str:
    """What the hang report says of a failed collective; raises SystemExit where another rank says
    it already."""
    assert runtime.hang_report is not None
    told = runtime.hang_report.report(error)
    if told is None:
        raise SystemExit(EXIT_LOST) from None
    return told


def _finish(job: Job, progress: Progress, ledger: LiveLedger | None, stop: StopRequest) -> None:
    """Write and show the summary; where it stands already, show it again."""
    spec, runtime = job.spec, job.runtime
    path = spec.run_path / "summary.json"
    known = Summary.read(path) if runtime.is_first else None
    current = known is not None and known.steps == progress.step and known.spec_hash == spec.hash
    if not runtime.broadcast(int(current)):
        known = _summarize(job, progress, stop)
        if ledger is not None:
            known = known.model_copy(update={"ledger": summed(ledger.ledger(), progress.step)})
        summary = known
        runtime.first(lambda: _write_summary(path, summary))
    if runtime.is_first and known is not None:
        show_summary(known, spec)


def _summarize(job: Job, progress: Progress, stop: StopRequest) -> Summary:
    spec, runtime = job.spec, job.runtime
    count = spec.eval.final_sequences
    total = sum(min(len(one), count) for one in job.held_out.values())
    job.events.publish(
        Notice(step=progress.step, text=f"scoring {total:,} held-out sequences for the summary")
    )
    result = evaluate(job, count, step=progress.step, stop=stop)
    job.events.publish(
        Evaluated(
            step=progress.step,
            loss=result.loss,
            bits_per_byte=result.bits_per_byte,
            whole=all(len(one) <= count for one in job.held_out.values()),
            bits_per_byte_by_set=result.bits_per_byte_by_set,
        )
    )
    text = ""
    if spec.sample.tokens:
        text = generate(job, load_tokenizer(spec.data), spec.sample).text
    return Summary(
        val_bits_per_byte=result.bits_per_byte,
        val_bits_per_byte_by_set=result.bits_per_byte_by_set,
        train_loss_first=progress.train_loss_first,
        train_loss_last=progress.train_loss_last,
        tokens_per_second=progress.tokens_seen / max(progress.train_seconds, 1e-9),
        peak_memory_bytes=int(runtime.maximum(peak_memory_bytes())),
        steps=progress.step,
        tokens=progress.tokens_seen,
        world_size=runtime.world,
        layout=job.topology.describe(),
        checkpoint=ckpt.open_store(spec.checkpoint_path).where(
            ckpt.format.manifest_key(progress.step)
        ),
        spec_hash=spec.hash,
        moe_layers=evaluated_moe_layers(job),
        tokens_per_expert=result.tokens_per_expert_LE,
        sample=text,
    )


def _write_summary(path: Path, summary: Summary) -> None:
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(summary.model_dump_json(indent=1) + "\n")
        draft.replace(path)
    except OSError as error:
        raise InputError(f"run_dir: {path} cannot be written: {error.strerror}") from None
