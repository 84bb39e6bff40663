"""The run, from a spec to an exit code."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry

import ckpt
from ckpt import AsyncCheckpointer, CheckpointError
from pretrain.checkpoint import (
    Checkpointer,
    CheckpointProgress,
    checkpoint_arrays,
    join_peers,
    launch_secret,
    newest_shared_step,
    remove_run,
    restore,
    roll_back,
    start_saver,
)
from pretrain.data import prepare_corpus
from pretrain.elastic import ChosenLayout, launched_layout, stand_by, with_spares
from pretrain.errors import (
    EXIT_DONE,
    EXIT_LOST,
    EXIT_TRY_AGAIN,
    HealthError,
    InputError,
    LostRankError,
)
from pretrain.job import Job, build_job
from pretrain.observe import (
    Console,
    Endpoint,
    Evaluated,
    Events,
    History,
    JsonlLog,
    Metrics,
    RunDone,
    RunStarted,
    RunStopped,
    StatusFile,
    Summary,
    say,
    show_summary,
)
from pretrain.runtime import (
    Runtime,
    StopRequest,
    end_with_torchrun,
    launched_rank,
    lock_run,
    peak_memory_bytes,
    start,
)
from pretrain.spec import JobSpec
from pretrain.state import Progress
from pretrain.train.detection import flight_folder, watch_ranks
from pretrain.train.evaluate import evaluate
from pretrain.train.generate import generate
from pretrain.train.trainer import Trainer

_LOCK_SECONDS = 60.0
"""Longer than a rank whose torchrun is gone takes to end."""


def run(spec: JobSpec, status: StatusFile | None = None) -> int:
    """Pretrain as the spec says; returns the exit code.

    Args:
        spec: of the run.
        status: on rank 0, where the run's beginning and end are recorded.

    Raises:
        InputError, CheckpointError: nothing can be done with this spec, data or checkpoint.
        HealthError: the loss or the gradient stayed not finite.
    """
    stop = StopRequest()
    end_with_torchrun()
    layout = launched_layout(spec)
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
        code = _run(spec, runtime, stop, layout)
        if status is not None:
            status.end(code)
        tell_spares(code)
        return code


def prepare(spec: JobSpec, *, reset: bool = False, load_step: int | None = None) -> None:
    """Prepare the corpus of a spec, and change what the next start of the run begins from.

    Args:
        spec: the run.
        reset: remove the run's log, summary, status and checkpoints; the next start is a new run.
        load_step: roll the run back: the next start resumes from this step. Newer checkpoints are
            moved to ``away/``, and checkpoints in nodes' memory and on their disks are not taken.

    Raises InputError where the corpus cannot be made, another run holds the folder, there is no
    such step, or a file cannot be removed.
    """
    prepare_corpus(spec.data, spec.model.vocab_size, say)
    if not reset and load_step is None:
        return
    with lock_run(spec):
        try:
            if load_step is not None:
                roll_back(spec.checkpoint_path, load_step, say)
                return
            remove_run(spec.checkpoint_path)
            for name in ("log.jsonl", "summary.json", "status.json"):
                (spec.run_path / name).unlink(missing_ok=True)
            shutil.rmtree(spec.run_path / "flight", ignore_errors=True)
        except OSError as error:
            raise InputError(
                f"checkpoint.path ({spec.checkpoint_path}) cannot be changed: {error.strerror}"
            ) from None


def _run(spec: JobSpec, runtime: Runtime, stop: StopRequest, layout: ChosenLayout) -> int:
    runtime.first(lambda: prepare_corpus(spec.data, spec.model.vocab_size, say))
    events = Events(Console(spec.train.steps, runtime.rank))
    job = build_job(spec, runtime, events, layout.topology)
    secret = launch_secret(runtime)
    writer = runtime.together(lambda: start_saver(job, secret))
    ended = False
    try:
        join_peers(job, writer, runtime.together(writer.ready), secret)
        with ExitStack() as sinks:
            code = _train(job, stop, writer, sinks, layout)
        ended = True
    finally:
        # What only nodes have is theirs to keep, unless the run has ended with all of it shared.
        writer.close() if ended else writer.leave()
    return code


def _train(
    job: Job,
    stop: StopRequest,
    writer: AsyncCheckpointer,
    sinks: ExitStack,
    layout: ChosenLayout,
) -> int:
    runtime, path = job.runtime, job.spec.run_path / "log.jsonl"
    history = History.read(path) if runtime.is_first else History()
    url = runtime.first(lambda: _open_sinks(job, path, sinks))
    progress = restore(job, writer.tiers)
    checkpoints = CheckpointProgress.after(progress.step, max(0, newest_shared_step(job)))
    runtime.together(lambda: writer.prepare(job.topology, checkpoint_arrays(job)))
    job.events.publish(_started(job, progress, url, layout))
    checkpointer = Checkpointer(job, writer, stop=stop, history=history, progress=checkpoints)
    trainer = Trainer(job, progress, checkpointer)
    with _watched(job, trainer), watch_ranks(job):
        if trainer.train(stop):
            job.events.publish(RunStopped(step=trainer.progress.step))
            return EXIT_TRY_AGAIN
        _finish(job, trainer.progress)
    job.events.publish(RunDone(step=trainer.progress.step))
    return EXIT_DONE


def _open_sinks(job: Job, path: Path, sinks: ExitStack) -> str | None:
    """Let the log and the metrics have the run's events; returns where the metrics are served."""
    spec = job.spec
    log = JsonlLog(path)
    sinks.callback(log.close)
    job.events.subscribe(log)
    registry = CollectorRegistry()
    job.events.subscribe(Metrics(registry, spec, job.topology, version("convoy-moe")))
    if spec.metrics.port < 0:
        return None
    endpoint = Endpoint(registry, spec.metrics.host, spec.metrics.port)
    sinks.callback(endpoint.close)
    return endpoint.url


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
    )


@contextmanager
def _watched(job: Job, trainer: Trainer) -> Iterator[None]:
    """Where a collective fails, say which, and who is not in it."""
    try:
        yield
    except (HealthError, CheckpointError):
        raise
    except RuntimeError as error:
        hang_report = job.runtime.hang_report
        if hang_report is None or not hang_report.is_lost(error):
            raise
        told = hang_report.report(error)
        if told is None:
            raise SystemExit(EXIT_LOST) from None
        hint = f"convoy inspect flight {flight_folder(job)} shows where ranks part"
        raise LostRankError(f"after step {trainer.progress.step}, {told}; {hint}") from error


def _finish(job: Job, progress: Progress) -> None:
    """Write and show the summary; where it stands already, show it again."""
    spec, runtime = job.spec, job.runtime
    path = spec.run_path / "summary.json"
    known = Summary.read(path) if runtime.is_first else None
    current = known is not None and known.steps == progress.step and known.spec_hash == spec.hash
    if not runtime.broadcast(int(current)):
        known = _summarize(job, progress)
        summary = known
        runtime.first(lambda: _write_summary(path, summary))
    if runtime.is_first and known is not None:
        show_summary(known, spec)


def _summarize(job: Job, progress: Progress) -> Summary:
    spec, runtime, corpus = job.spec, job.runtime, job.corpus
    result = evaluate(job, step=progress.step)
    job.events.publish(
        Evaluated(
            step=progress.step, loss=result.loss, bits_per_byte=result.bits_per_byte, whole=True
        )
    )
    text = generate(job) if spec.sample.tokens else ""
    return Summary(
        val_bits_per_byte=result.bits_per_byte,
        gzip_bits_per_byte=8 * corpus.val_gzip_bytes / corpus.val_bytes,
        xz_bits_per_byte=8 * corpus.val_xz_bytes / corpus.val_bytes,
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
        moe_layers=job.moe_layers,
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
