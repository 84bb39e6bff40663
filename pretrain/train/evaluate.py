"""Held-out loss in bits per byte, and text from the model.

Legend: B batch, S sequence, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from corpus.tokenizer import bytes_per_token, load_tokenizer
from parallel import free_gathered, on_loss_grid
from pretrain.data import Sequences, read_batch
from pretrain.job import Job
from pretrain.parallelize import ParallelModel, RoutingStats
from pretrain.runtime import Runtime, StopCause, StopRequest


@contextmanager
def inference(parallel_model: ParallelModel) -> Iterator[None]:
    """Forwards alone; afterwards the model is as training left it."""
    for stage in parallel_model.stages.values():
        stage.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for stage in parallel_model.stages.values():
            free_gathered(stage)
            stage.train()


@dataclass(frozen=True)
class Evaluation:
    """Over all ranks' held-out sequences."""

    loss: float
    """Mean negative log-likelihood per token, in nats."""
    bits_per_byte: float
    tokens: int
    text_bytes: int
    tokens_per_expert_LE: list[list[int]]
    bits_per_byte_by_set: dict[str, float] = field(default_factory=dict)
    """Of each set by itself, where there are several."""


class StoppedEvaluationError(Exception):
    """Some rank was asked to stop; every rank raises this error, with the cause of all."""

    def __init__(self, cause: StopCause) -> None:
        super().__init__(cause)
        self.cause = cause


def evaluate(
    job: Job, limit: int | None = None, *, step: int = 0, stop: StopRequest | None = None
) -> Evaluation:
    """Score what the sources hold out, and each further validation set; every rank must call.

    Args:
        job: the run.
        limit: how many sequences of each set, taken at even distances; all of them where None.
        step: committed steps, for the heartbeat.
        stop: this rank's requests to stop; None to score to the end.

    Returns:
        The evaluation over all sources together, with the bits per byte of each set.

    Raises StoppedEvaluationError on every rank where a rank was asked to stop meanwhile.
    """
    each = {name: _score(job, one, limit, step, stop) for name, one in job.held_out.items()}
    sources = [each[one.name] for one in job.corpora.sources]
    if len(each) == 1:
        return sources[0]
    by_set = {name: one.bits_per_byte for name, one in each.items()}
    tokens, size = sum(one.tokens for one in sources), sum(one.text_bytes for one in sources)
    nats = sum(one.loss * one.tokens for one in sources)
    loads = [torch.tensor(one.tokens_per_expert_LE) for one in sources]
    return Evaluation(
        loss=nats / max(tokens, 1),
        bits_per_byte=nats / math.log(2) / max(size, 1),
        tokens=tokens,
        text_bytes=size,
        tokens_per_expert_LE=torch.stack(loads).sum(0).tolist(),
        bits_per_byte_by_set=by_set,
    )


def _score(
    job: Job, held_out: Sequences, limit: int | None, step: int, stop: StopRequest | None
) -> Evaluation:
    """Score sequences of one set, spread over the ranks.

    Bits per byte are the summed loss in bits over the bytes of text that the target tokens stand
    for, and so do not depend on the tokenizer. The cost of predicting where a document ends is in
    the numerator.
    """
    total = len(held_out)
    count = total if limit is None else min(limit, total)
    indices = [i * total // count for i in range(count)]
    size, ranks = job.spec.batch.micro_batch_size, job.dims.dp_size
    data, vocab_size = job.spec.data, job.spec.model.vocab_size
    lengths = torch.from_numpy(bytes_per_token(load_tokenizer(data), vocab_size, data.end_token))
    sums = torch.zeros(3, dtype=torch.float64)  # nats, tokens, bytes
    routing: RoutingStats | None = None
    part = job.local_batch
    with inference(job.parallel_model), part.vocabulary_parallel():
        # As many forwards on every rank, some of them of no sequences: all exchange tokens.
        for start in range(0, count, size * ranks):
            job.runtime.heartbeat.beat("evaluate", step)
            if stop is not None:
                _check_stop(job.runtime, stop)
            # A micro-batch has the same sequences on any number of ranks, as in training.
            first = start + size * job.dims.dp_rank
            mine = indices[first : first + size]
            batch = read_batch(held_out, mine)
            inputs_BS, targets_BS = part.inputs_and_targets(batch)
            # Of the batch as it is: what it is filled up with may become the end token's id.
            documents = part.documents(batch[:, :-1].to(job.runtime.device))
            out, stats = job.forward(
                inputs_BS.clamp_min(0).to(job.runtime.device),
                documents,
                routed=part.routed_tokens(batch),
            )
            if stats is not None:
                routing = stats.plus(routing)
            if out is None:
                continue
            nll = part.next_token_loss(out.logits, targets_BS.to(job.runtime.device))
            counted = part.counted_targets(batch, targets_BS)
            real = counted[counted >= 0]
            if part.owns_loss:
                sums += torch.tensor(
                    [float(on_loss_grid(nll)), real.numel(), int(lengths[real].sum())],
                    dtype=torch.float64,
                )
    nats, tokens, text_bytes = job.runtime.sum_in_training(sums).tolist()
    loads = []
    if routing is not None:
        loads = job.runtime.sum_in_training(routing.tokens_per_expert_LE).tolist()
    # An evaluation has no multi-token prediction, and a pipeline has rows of its layers, which are
    # the last ones.
    loads = loads[: len(job.evaluated_moe_layers)]
    return Evaluation(
        loss=nats / max(tokens, 1),  # of conversations, few sequences may have no answer
        bits_per_byte=nats / math.log(2) / max(text_bytes, 1),
        tokens=int(tokens),
        text_bytes=int(text_bytes),
        tokens_per_expert_LE=loads,
    )


def _check_stop(runtime: Runtime, stop: StopRequest) -> None:
    """Raise StoppedEvaluationError on every rank where some rank was asked to stop."""
    cause = StopCause(int(runtime.maximum_in_training(stop.urgent_cause)))
    if cause:
        raise StoppedEvaluationError(cause)
