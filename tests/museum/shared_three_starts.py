"""A run of one process that is started three times, and the tokens that each start trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from corpus.prepare.prepare import prepare_corpus
from pretrain.checkpoint.resume import restore
from pretrain.data import GlobalOrder, open_corpora
from pretrain.job import build_job
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.train.trainer import Trainer
from tests.support.jobs import make_spec, save_checkpoint, write_corpus
from tests.support.layouts import NoCheckpoints
from tests.support.ranks import run_ranks

BATCH = 8


def three_starts(folder: Path) -> tuple[int, list[np.ndarray], list[np.ndarray]]:
    """The sequences of an epoch, the rows of each start, and the rows that an unbroken run has in
    their places.

    The first start ends within the first epoch, the second one within the second epoch, where the
    third one goes on. Each start builds the job anew and begins from the newest checkpoint.
    """
    write_corpus(folder / "text", files=8)
    batch = {"global_batch_size": BATCH, "micro_batch_size": BATCH}
    spec = make_spec(folder, data={"seq_len": 256}, batch=batch)
    prepare_corpus(spec.data, spec.model.vocab_size, lambda _: None)
    sequences = open_corpora(spec.data, spec.model.vocab_size).train_sequences()
    count = len(sequences)
    whole_steps = count // BATCH
    steps = [1, whole_steps + 1, 2]
    assert whole_steps > 2, "the first start ends within the first epoch"
    (taken,) = run_ranks(_on_rank, 1, spec, steps, group=False)
    order, expected, sample = GlobalOrder(count, spec.train.seed), [], 0
    for some in steps:
        samples = range(sample, sample + some * BATCH)
        expected.append(sequences.read([order[i] for i in samples]))
        sample = samples.stop
    return count, taken, expected


def _on_rank(rank: int, spec: JobSpec, steps: list[int]) -> list[np.ndarray]:
    runtime = start(spec.train.timeout_seconds)
    taken = []
    for some in steps:
        job = build_job(spec, runtime)
        training = Trainer(job, restore(job), NoCheckpoints())
        rows = []
        for _ in range(some):
            training.step(False)
            assert training.committed is not None
            rows += [batch.numpy() for batch in training.committed[1].batches]
        save_checkpoint(job, training.progress)
        taken.append(np.concatenate(rows))
    runtime.close()
    return taken
