"""The run, from a spec to an exit code."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

from prometheus_client import CollectorRegistry

import ckpt
from ckpt import CheckpointError, Saver
from pretrain.checkpoint import (
    Saves,
    checkpoint_arrays,
    forget_run,
    go_back,
    join_peers,
    newest_shared_step,
    restore,
    start_saver,
)
from pretrain.data import prepare_corpus
from pretrain.errors import (
    EXIT_DONE,
    EXIT_LOST,
    EXIT_TRY_AGAIN,
    HealthError,
    InputError,
    LostRankError,
)
from pretrain.job import Job, build_job
from pretrain.observe import Endpoint, History, Metrics, RunLog, Summary, say, show_summary
from pretrain.runtime import Runtime, StopRequest, lock_run, peak_memory_bytes, start
from pretrain.spec import JobSpec
from pretrain.state import Progress
from pretrain.train.evaluate import evaluate
from pretrain.train.generate import generate
from pretrain.train.trainer import Training, train


def run(spec: JobSpec) -> int:
    """Pretrain as the spec says; returns the exit code.

    Raises:
        InputError, CheckpointError: nothing can be done with this spec, data or checkpoint.
        HealthError: the loss or the gradient stayed not finite.
    """
    stop = StopRequest()
    runtime = start(spec.train.timeout_seconds)
    with ExitStack() as held:
        held.callback(runtime.close)
        held.callback(stop.restore)
        runtime.first(lambda: held.enter_context(lock_run(spec)))
        return _run(spec, runtime, stop)


def prepare(spec: JobSpec, fresh: bool = False, back_to: int | None = None) -> None:
    """Prepare the corpus; with ``fresh``, remove the run's log, summary and checkpoints; with
    ``back_to``, let it go on from an older step than its newest.

    Raises InputError where the corpus cannot be made, another run holds the folder, there is no
    such step, or something cannot be removed.
    """
    prepare_corpus(spec.data, spec.model.vocab_size, say)
    if not fresh and back_to is None:
        return
    with lock_run(spec):
        try:
            if back_to is not None:
                go_back(spec.checkpoint_path, back_to)
                return
            forget_run(spec.checkpoint_path)
            for name in ("log.jsonl", "summary.json"):
                (spec.run_path / name).unlink(missing_ok=True)
        except OSError as error:
            raise InputError(
                f"checkpoint.path ({spec.checkpoint_path}) cannot be changed: {error.strerror}"
            ) from None


def _run(spec: JobSpec, runtime: Runtime, stop: StopRequest) -> int:
    runtime.first(lambda: prepare_corpus(spec.data, spec.model.vocab_size, say))
    job = build_job(spec, runtime)
    key = f"{runtime.broadcast(secrets.randbits(62)):016x}"
    saver = runtime.together(lambda: start_saver(job, key))
    ended = False
    try:
        join_peers(job, saver, runtime.together(saver.ready), key)
        code = _train(job, stop, saver)
        ended = True
    finally:
        # What only nodes have is theirs to keep, unless the run has ended with all of it shared.
        saver.close() if ended else saver.leave()
    return code


def _train(job: Job, stop: StopRequest, saver: Saver) -> int:
    spec, runtime = job.spec, job.runtime
    began = time.perf_counter()
    progress = restore(job, saver.tiers)
    shared_step = max(0, newest_shared_step(job))
    runtime.together(lambda: saver.prepare(job.topology, checkpoint_arrays(job)))
    history = History.read(spec.run_path / "log.jsonl") if runtime.is_first else History()
    log = runtime.together(lambda: RunLog(spec.run_path / "log.jsonl", spec.hash, runtime.is_first))
    registry = CollectorRegistry()
    metrics = Metrics(registry, spec, job.topology, version("convoy-moe"))
    if progress.step:
        metrics.restore_duration.set(time.perf_counter() - began)
    endpoint = _serve(spec, runtime, registry)
    _greet(job, progress, log, endpoint)
    saves = Saves(job, saver, stop, log, metrics, history, progress.step, shared_step)
    try:
        training = Training(job, progress, log, metrics, saves)
        with _watched(runtime, training):
            if train(training, stop):
                if runtime.is_first:
                    say(f"stopped after step {training.progress.step}; the same command resumes")
                log.write("stopped", step=training.progress.step)
                return EXIT_TRY_AGAIN
            _finish(job, training.progress, log)
        log.write("done", step=training.progress.step)
        return EXIT_DONE
    finally:
        log.close()
        if endpoint is not None:
            endpoint.close()


@contextmanager
def _watched(runtime: Runtime, training: Training) -> Iterator[None]:
    """Where a collective fails, say which, and who is not in it."""
    try:
        yield
    except (HealthError, CheckpointError):
        raise
    except RuntimeError as error:
        roll_call = runtime.roll_call
        if roll_call is None or not roll_call.is_lost(error):
            raise
        told = roll_call.call(error)
        if told is None:
            raise SystemExit(EXIT_LOST) from None
        raise LostRankError(f"after step {training.progress.step}, {told}") from error


def _serve(spec: JobSpec, runtime: Runtime, registry: CollectorRegistry) -> Endpoint | None:
    endpoints: list[Endpoint] = []
    if spec.metrics.port >= 0:
        runtime.first(
            lambda: endpoints.append(Endpoint(registry, spec.metrics.host, spec.metrics.port))
        )
    return endpoints[0] if endpoints else None


def _greet(job: Job, progress: Progress, log: RunLog, endpoint: Endpoint | None) -> None:
    spec, runtime = job.spec, job.runtime
    parameters = sum(p.numel() for p in job.laid_out.whole.parameters())
    log.write(
        "start",
        step=progress.step,
        world_size=runtime.world,
        topology=job.topology.as_dict(),
        parameters=parameters,
        launch_id=runtime.launch_id,
    )
    if not runtime.is_first:
        return
    say(
        f"{spec.name}: {parameters:,} parameters on {runtime.world} ranks "
        f"({job.topology.describe()}), {runtime.device.type}; "
        f"{spec.train.steps} steps of {spec.global_batch_tokens:,} tokens; spec {spec.hash[:12]}"
    )
    if endpoint is not None:
        say(f"metrics at {endpoint.url}")
    if progress.step >= spec.train.steps:
        say(f"done already: step {progress.step} of {spec.train.steps}")
    elif progress.step:
        say(f"resuming after step {progress.step}")


def _finish(job: Job, progress: Progress, log: RunLog) -> None:
    """Write and show the summary; where it stands already, show it again."""
    spec, runtime = job.spec, job.runtime
    path = spec.run_path / "summary.json"
    known = Summary.read(path) if runtime.is_first else None
    current = known is not None and known.steps == progress.step and known.spec_hash == spec.hash
    if not runtime.broadcast(int(current)):
        known = _summarize(job, progress, log)
        summary = known
        runtime.first(lambda: _write_summary(path, summary))
    if runtime.is_first and known is not None:
        show_summary(known, spec)


def _summarize(job: Job, progress: Progress, log: RunLog) -> Summary:
    spec, runtime, corpus = job.spec, job.runtime, job.corpus
    result = evaluate(job)
    log.write(
        "eval", step=progress.step, loss=result.loss, bits_per_byte=result.bits_per_byte, whole=True
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
        checkpoint=ckpt.manifest_name(spec.checkpoint_path, progress.step),
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
