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
from torch import Tensor, nn

from parallel import free_gathered, whole_sequences
from pretrain.corpus import bytes_per_token, end_of_document, load_tokenizer
from pretrain.job import Job
from pretrain.step import Routing, inputs_and_targets, next_token_loss, routing_of


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Forwards alone; afterwards the model is as training left it."""
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        free_gathered(model)
        model.train()


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
    with inference(job.model):
        # As many forwards on every rank, some of them of no sequences: all exchange tokens.
        for start in range(0, count, size * ranks):
            mine = indices[start : start + size * ranks][job.dims.dp_rank :: ranks]
            batch = job.held_out.batch(mine)
            inputs_BS, targets_BS = inputs_and_targets(batch, job.dims.cp_mesh)
            out = job.model(inputs_BS.clamp_min(0).to(job.runtime.device))
            nll = next_token_loss(out.logits, targets_BS.to(job.runtime.device))
            real = targets_BS[targets_BS >= 0]
            sums += torch.tensor(
                [float(nll), real.numel(), int(lengths[real].sum())], dtype=torch.float64
            )
            if out.aux:
                routing = routing_of(out.aux, targets_BS.numel()).plus(routing)
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


def generate(job: Job) -> str:
    """The spec's prompt and what the model makes of it; every rank must call.

    All ranks compute the same text, since each holds only some of the experts. Deterministic: the
    generator is seeded from the spec.
    """
    sample = job.spec.sample
    tokenizer = load_tokenizer(job.spec.data)
    end = end_of_document(tokenizer, job.spec.data.end_token)
    tokens: list[int] = tokenizer.encode(sample.prompt, add_special_tokens=False).ids or [end]
    generator = torch.Generator().manual_seed(job.spec.train.seed)
    with inference(job.model), whole_sequences(job.model):
        for _ in range(sample.tokens):
            window = torch.tensor([tokens[-job.spec.data.seq_len :]], device=job.runtime.device)
            logits = job.model(window).logits[0, -1].float().cpu()
            if sample.temperature == 0:
                token = int(logits.argmax())
            else:
                probs = (logits / max(sample.temperature, 1e-3)).softmax(-1)
                token = int(torch.multinomial(probs, 1, generator=generator))
            token = job.runtime.broadcast(token)
            if token == end:
                break
            tokens.append(token)
    return str(tokenizer.decode(tokens))
