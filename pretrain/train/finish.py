"""The end of a run: the last evaluation, a text, and the summary."""

from __future__ import annotations

from pathlib import Path

import ckpt
from corpus.tokenizer import load_tokenizer
from pretrain.errors import (
    InputError,
)
from pretrain.job import Job
from pretrain.observe import (
    Evaluated,
    LiveLedger,
    Summary,
    show_summary,
    summed,
)
from pretrain.runtime import (
    StopRequest,
    peak_memory_bytes,
)
from pretrain.state import Progress
from pretrain.train.evaluate import evaluate
from pretrain.train.generation import generate


def finish(job: Job, progress: Progress, ledger: LiveLedger | None, stop: StopRequest) -> None:
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
    total = sum(min(len(sequences), count) for sequences in job.held_out.values())
    job.events.note(f"scoring {total:,} held-out sequences for the summary", step=progress.step)
    result = evaluate(job, count, step=progress.step, stop=stop)
    job.events.publish(
        Evaluated(
            step=progress.step,
            loss=result.loss,
            bits_per_byte=result.bits_per_byte,
            whole=all(len(sequences) <= count for sequences in job.held_out.values()),
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
        moe_layers=job.evaluated_moe_layers,
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
