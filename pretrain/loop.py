"""The run, from a spec to an exit code."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist
from prometheus_client import CollectorRegistry

import ckpt
from parallel import grad_square_sum, scale_gradients
from pretrain.barrier import Action, Decision, Report, decide, exchange
from pretrain.corpus import prepare_corpus
from pretrain.data import Cursor
from pretrain.errors import EXIT_DONE, EXIT_TRY_AGAIN, HealthError, InputError
from pretrain.evaluate import evaluate, generate, sum_over_ranks
from pretrain.flops import forward_flops, peak_flops_per_second
from pretrain.job import Job, build_job, restore, save_checkpoint
from pretrain.log import RunLog, progress_line, say
from pretrain.metrics import Endpoint, Metrics
from pretrain.optim import set_lr
from pretrain.runtime import Runtime, StopRequest, lock_run, peak_memory_bytes, start
from pretrain.spec import JobSpec
from pretrain.state import Progress
from pretrain.step import Routing
from pretrain.summary import Summary, show_summary


class Training:
    """The loop's own state: where it is, and what a log interval has gathered."""

    def __init__(self, job: Job, progress: Progress, log: RunLog, metrics: Metrics) -> None:
        self.job, self.progress, self.log, self.metrics = job, progress, log, metrics
        spec, runtime = job.spec, job.runtime
        self.flops_per_token = forward_flops(spec.model, spec.moe, spec.data.seq_len).training
        self.peak_flops = runtime.total(peak_flops_per_second(runtime.device, spec.train.dtype))
        """Of all ranks, in a second."""
        self.saved = progress.step
        """The step of the newest checkpoint; 0 where there is none."""
        self.skipped = 0
        self.routing: Routing | None = None
        self.interval_tokens = 0
        self.interval_seconds = 0.0
        self.rank_rows: list[float] = []

    def step(self, stop_requested: bool) -> Decision:
        """One step: forward, backward, barrier, and the update where all commit.

        Raises HealthError on every rank after too many steps in a row that are not finite.
        """
        job, spec = self.job, self.job.spec
        began = time.perf_counter()
        batches, cursor = job.loader.step(Cursor(self.progress.cursor))
        waited = time.perf_counter() - began
        planned = (cursor.sample_index - self.progress.cursor) * spec.data.seq_len
        result = job.forward_backward(batches, planned)
        report = Report(
            loss_sum=float(result.loss_sum),
            target_tokens=result.target_tokens,
            grad_square_sum=float(grad_square_sum(job.model, job.dims)),
            stop_requested=stop_requested,
            step_seconds=time.perf_counter() - began,
            data_wait_seconds=waited,
            expert_rows=result.expert_rows,
            expert_seconds=result.expert_seconds,
            bad_layer=_bad_layer(job.moe_layers, result.routing),
        )
        reports = exchange(report, job.runtime.device)
        decision = decide(reports, planned)
        lr = spec.optimizer.lr * spec.schedule.ratio(self.progress.step, spec.train.steps)
        if decision.action is Action.COMMIT:
            self._commit(decision, lr, cursor, planned, began)
            if result.routing is not None:
                self._record_routing(result.routing, reports)
        job.optimizer.zero_grad()
        seconds = time.perf_counter() - began
        self.metrics.record_step(decision, lr, self.progress.cursor, seconds)
        if decision.action is Action.COMMIT:
            tokens = decision.target_tokens
            self.metrics.record_flops(self.flops_per_token * tokens, self.mfu(tokens, seconds))
        if decision.action is Action.SKIP:
            self._skip(decision)
        return decision

    def _commit(
        self, decision: Decision, lr: float, cursor: Cursor, planned: int, began: float
    ) -> None:
        job, clip = self.job, self.job.spec.optimizer.clip_norm
        factor = planned / decision.target_tokens
        if clip and decision.grad_norm > clip:
            factor *= clip / decision.grad_norm
        scale_gradients(job.model, factor)
        set_lr(job.optimizer, lr)
        job.optimizer.step()
        seconds = time.perf_counter() - began
        before = self.progress
        first = before.train_loss_first
        self.progress = Progress(
            step=before.step + 1,
            tokens_seen=before.tokens_seen + decision.target_tokens,
            cursor=cursor.sample_index,
            train_loss_first=decision.loss if first is None else first,
            train_loss_last=decision.loss,
            train_seconds=before.train_seconds + seconds,
        )
        self.skipped = 0
        self.interval_tokens += decision.target_tokens
        self.interval_seconds += seconds
        self.log.write(
            "step",
            step=self.progress.step,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            lr=lr,
            tokens_seen=self.progress.tokens_seen,
            cursor=self.progress.cursor,
            seconds=seconds,
            slowest_rank_seconds=decision.step_seconds,
        )

    def _record_routing(self, routing: Routing, reports: Sequence[Report]) -> None:
        """Add to the interval's figures, and move biases and capacity by the whole step's loads."""
        self.routing = routing.plus(self.routing)
        before = self.rank_rows or [0.0] * len(reports)
        self.rank_rows = [a + r.expert_rows for a, r in zip(before, reports, strict=True)]
        balance = self.job.balance
        if balance is not None and balance.after(self.progress.step, reports):
            balance.apply(self.job.routers, self.job.runtime.rank)
            self.log.write(
                "capacity_plan",
                step=self.progress.step,
                plans=balance.plans,
                relative_speeds=balance.relative_speeds,
            )
        moe = self.job.spec.moe
        if moe is not None and moe.expert_bias and moe.bias_update_rate:
            everywhere = routing.tokens_per_expert_LE.clone()
            dist.all_reduce(everywhere)
            for row, router in zip(self.job.router_rows, self.job.routers, strict=True):
                router.update_bias(everywhere[row])

    def _skip(self, decision: Decision) -> None:
        self.skipped += 1
        step = self.progress.step + 1
        self.log.write(
            "skip",
            step=step,
            loss=decision.loss,
            grad_norm=decision.grad_norm,
            bad_router=decision.bad_router,
        )
        if self.job.runtime.is_first:
            say(f"step {step} skipped: {decision.why}")
        if self.skipped >= self.job.spec.train.max_skipped_steps:
            raise HealthError(
                f"step {step} was not finite {self.skipped} times in a row ({decision.why}); "
                f"{self._way_back()}"
            )

    def _way_back(self) -> str:
        # What came just before is suspect: it is not saved over an older state that is not.
        root = self.job.spec.checkpoint_path
        if not self.saved:
            return "nothing was saved; start over with a lower optimizer.lr"
        return (
            f"the newest checkpoint is step {self.saved} in {root}; lower optimizer.lr, and if the "
            f"state was bad by then move its manifest away to resume from the one before"
        )

    def mfu(self, tokens: int, seconds: float) -> float:
        """Model FLOPs utilization (Chowdhery et al., arXiv 2204.02311, appendix B)."""
        return self.flops_per_token * tokens / seconds / self.peak_flops

    def report_interval(self, decision: Decision) -> None:
        """Print and publish what the last steps gathered; every rank must call."""
        job = self.job
        values = {
            "loss": decision.loss,
            "lr": job.optimizer.param_groups[0]["lr"],
            "grad_norm": decision.grad_norm,
            "tokens_per_second": self.interval_tokens / self.interval_seconds,
            "mfu": self.mfu(self.interval_tokens, self.interval_seconds),
        }
        if self.routing is not None:
            rows = sum_over_ranks(job, self.routing.tokens_per_expert_LE).tolist()
            entropy_sums = sum_over_ranks(job, self.routing.entropy_sum_L)
            entropies = (entropy_sums / self.interval_tokens).tolist()
            biases = [r.expert_bias for r in job.routers if r.expert_bias is not None]
            bias = job.runtime.maximum(max((float(b.abs().max()) for b in biases), default=-1.0))
            moved = sum_over_ranks(job, self.routing.moved_L2).tolist()
            self.metrics.record_routing(
                job.moe_layers, rows, entropies, moved, None if bias < 0 else bias
            )
            self.metrics.rank_imbalance.set(_imbalance(self.rank_rows, job.topology.pp))
            if job.balance is not None:
                self.metrics.record_capacity(job.balance.shares, job.balance.relative_speeds)
            values["dropped"] = sum(dropped for dropped, _ in moved)
            values["rerouted"] = sum(rerouted for _, rerouted in moved)
            values["load_imbalance"] = max(max(row) * len(row) / sum(row) for row in rows)
            values["router_entropy"] = min(entropies)
        if job.runtime.is_first:
            say(progress_line(self.progress.step, job.spec.train.steps, values))
        self.log.write("interval", step=self.progress.step, **values)
        self.routing, self.interval_tokens, self.interval_seconds = None, 0, 0.0
        self.rank_rows = []

    def validate(self) -> None:
        """Score some held-out sequences; every rank must call."""
        job = self.job
        result = evaluate(job, job.spec.train.eval_sequences)
        bits = result.bits_per_byte
        self.log.write("eval", step=self.progress.step, loss=result.loss, bits_per_byte=bits)
        if job.runtime.is_first:
            say(f"validation at step {self.progress.step}: {bits:.4f} bits per byte")

    def save(self) -> None:
        """Commit a checkpoint; every rank must call."""
        began = time.perf_counter()
        save_checkpoint(self.job, self.progress)
        self.saved = self.progress.step
        seconds = time.perf_counter() - began
        self.metrics.record_save(seconds)
        path = ckpt.manifest_path(self.job.spec.checkpoint_path, self.progress.step)
        self.log.write("checkpoint", step=self.progress.step, seconds=seconds, path=str(path))
        if self.job.runtime.is_first:
            say(f"checkpoint of step {self.progress.step} committed in {seconds:.2f} s")


def _imbalance(rank_rows: list[float], stages: int) -> float:
    """The largest over the mean load of a rank, among ranks that have the same layers."""
    size = len(rank_rows) // stages
    groups = [rank_rows[i : i + size] for i in range(0, len(rank_rows), size)]
    return max(max(group) * size / max(sum(group), 1) for group in groups)


def _bad_layer(layers: list[int], routing: Routing | None) -> int:
    """The first layer with logits that are not finite, or -1."""
    counts = [] if routing is None else routing.not_finite_L.tolist()
    return next((layer for layer, count in zip(layers, counts, strict=False) if count), -1)


def train(training: Training, stop: StopRequest) -> bool:
    """Step until the spec's last, with evaluations and checkpoints on the way.

    Returns whether the run was asked to stop before that; either way the last step is committed.
    """
    spec = training.job.spec
    stopped = False
    while training.progress.step < spec.train.steps and not stopped:
        decision = training.step(stop.requested)
        stopped = decision.stop
        if decision.action is Action.SKIP and not stopped:
            continue
        step = training.progress.step
        if training.interval_tokens and (
            step % spec.train.log_interval_steps == 0 or step == spec.train.steps
        ):
            training.report_interval(decision)
        every = spec.train.eval_interval_steps
        if every and step % every == 0 and step < spec.train.steps and not stopped:
            training.validate()
        last = stopped or step == spec.train.steps
        if training.saved != step and (last or step % spec.checkpoint.interval_steps == 0):
            training.save()
    return stopped and training.progress.step < spec.train.steps


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


def prepare(spec: JobSpec, fresh: bool = False) -> None:
    """Prepare the corpus; with ``fresh``, remove the run's log, summary and checkpoints.

    Raises InputError where the corpus cannot be made, or another run holds the folder.
    """
    prepare_corpus(spec.data, spec.model.vocab_size, say)
    if fresh:
        with lock_run(spec):
            for name in ("manifests", "objects"):
                shutil.rmtree(spec.checkpoint_path / name, ignore_errors=True)
            for name in ("log.jsonl", "summary.json"):
                (spec.run_path / name).unlink(missing_ok=True)


def _run(spec: JobSpec, runtime: Runtime, stop: StopRequest) -> int:
    runtime.first(lambda: prepare_corpus(spec.data, spec.model.vocab_size, say))
    job = build_job(spec, runtime)
    began = time.perf_counter()
    progress = restore(job)
    log = runtime.together(lambda: RunLog(spec.run_path / "log.jsonl", spec.hash, runtime.is_first))
    registry = CollectorRegistry()
    metrics = Metrics(registry, spec, job.topology, version("convoy-moe"))
    if progress.step:
        metrics.restore_duration.set(time.perf_counter() - began)
    endpoint = _serve(spec, runtime, registry)
    _greet(job, progress, log, endpoint)
    try:
        training = Training(job, progress, log, metrics)
        if train(training, stop):
            if runtime.is_first:
                say(f"stopped after step {training.progress.step}; the same command resumes")
            log.write("stopped", step=training.progress.step)
            return EXIT_TRY_AGAIN
        _finish(job, training.progress, log)
        return EXIT_DONE
    finally:
        log.close()
        if endpoint is not None:
            endpoint.close()


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
        checkpoint=str(ckpt.manifest_path(spec.checkpoint_path, progress.step)),
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
