"""Held-out loss in bits per byte, and text from the model.

Legend: B batch, S sequence, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel import free_gathered, whole_sequences
from pretrain.corpus import bytes_per_token, end_of_document, load_tokenizer
from pretrain.job import Job
from pretrain.parallelize import LaidOut
from pretrain.spec import SampleConfig
from pretrain.step import Routing, next_token_loss


@contextmanager
def inference(laid_out: LaidOut) -> Iterator[None]:
    """Forwards alone; afterwards the model is as training left it."""
    for part in laid_out.parts.values():
        part.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in laid_out.parts.values():
            free_gathered(part)
            part.train()


@dataclass(frozen=True)
class Evaluation:
    """Over all ranks' held-out sequences."""

    loss: float
    """Mean negative log-likelihood per token, in nats."""
    bits_per_byte: float
    tokens: int
    text_bytes: int
    tokens_per_expert_LE: list[list[int]]


def evaluate(job: Job, limit: int | None = None) -> Evaluation:
    """Score held-out sequences, spread over the ranks; every rank must call.

    Bits per byte are the summed loss in bits over the bytes of text that the target tokens stand
    for, and so do not depend on the tokenizer. The cost of predicting where a document ends is in
    the numerator.

    Args:
        job: the run.
        limit: how many sequences, taken at even distances; all of them where None.
    """
    total = len(job.held_out)
    count = total if limit is None else min(limit, total)
    indices = [i * total // count for i in range(count)]
    size, ranks = job.spec.train.micro_batch_size, job.dims.dp_size
    data, vocab_size = job.spec.data, job.spec.model.vocab_size
    lengths = torch.from_numpy(bytes_per_token(load_tokenizer(data), vocab_size, data.end_token))
    sums = torch.zeros(3, dtype=torch.float64)  # nats, tokens, bytes
    routing: Routing | None = None
    part = job.part
    with inference(job.laid_out), part.vocabulary_parallel():
        # As many forwards on every rank, some of them of no sequences: all exchange tokens.
        for start in range(0, count, size * ranks):
            mine = indices[start : start + size * ranks][job.dims.dp_rank :: ranks]
            batch = job.held_out.batch(mine)
            inputs_BS, targets_BS = part.inputs_and_targets(batch)
            # Of the batch as it is: what it is filled up with may become the end token's id.
            documents = part.documents(batch[:, :-1].to(job.runtime.device))
            logits, routed = job.forward(inputs_BS.clamp_min(0).to(job.runtime.device), documents)
            if routed is not None:
                routing = routed.plus(routing)
            if logits is None:
                continue
            nll = next_token_loss(logits, targets_BS.to(job.runtime.device))
            real = targets_BS[targets_BS >= 0]
            if part.counts:
                sums += torch.tensor(
                    [float(nll), real.numel(), int(lengths[real].sum())], dtype=torch.float64
                )
    dist.all_reduce(sums, group=job.runtime.control_group)
    nats, tokens, text_bytes = sums.tolist()
    loads = [] if routing is None else sum_over_ranks(job, routing.tokens_per_expert_LE).tolist()
    return Evaluation(
        loss=nats / tokens,
        bits_per_byte=nats / math.log(2) / max(text_bytes, 1),
        tokens=int(tokens),
        text_bytes=int(text_bytes),
        tokens_per_expert_LE=loads,
    )


def sum_over_ranks(job: Job, values: Tensor) -> Tensor:
    """The sum over all ranks, on the host; every rank must call."""
    host = values.cpu().clone()
    dist.all_reduce(host, group=job.runtime.control_group)
    return host


def _whole(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def _next_token(logits_V: Tensor, sample: SampleConfig, generator: torch.Generator) -> int:
    logits_V = logits_V.float().cpu()
    if sample.temperature == 0:
        return int(logits_V.argmax())
    probs = (logits_V / max(sample.temperature, 1e-3)).softmax(-1)
    return int(torch.multinomial(probs, 1, generator=generator))


def generate(job: Job) -> str:
    """The spec's prompt and what the model makes of it; every rank must call.

    All ranks compute the same text, each what it holds of the model. Deterministic: the generator
    is seeded from the spec.
    """
    sample = job.spec.sample
    tokenizer = load_tokenizer(job.spec.data)
    end = end_of_document(tokenizer, job.spec.data.end_token)
    tokens: list[int] = tokenizer.encode(sample.prompt, add_special_tokens=False).ids or [end]
    generator = torch.Generator().manual_seed(job.spec.train.seed)
    # The first rank of those that have logits.
    last = 0 if job.laid_out.pipeline is None else job.laid_out.pipeline.last_place
    source = last * (job.runtime.world // job.topology.pp)
    with inference(job.laid_out), whole_sequences(job.model):
        for _ in range(sample.tokens):
            known = tokens[-job.spec.data.seq_len :]
            # Ranks of tensor parallelism have equal parts. What follows a token does not change it,
            # but where experts have a capacity, or choose: then the padding takes part.
            padding = [end] * (-len(known) % job.topology.tp)
            window = torch.tensor([known + padding], device=job.runtime.device)
            # One document, but for the end token that an empty prompt begins with.
            logits, _ = job.forward(window, job.part.documents(window))
            token = end
            if logits is not None:
                token = _next_token(_whole(logits[0, len(known) - 1]), sample, generator)
            token = job.runtime.broadcast(token, source)
            if token == end:
                break
            tokens.append(token)
    return str(tokenizer.decode(tokens))
