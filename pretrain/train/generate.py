"""Sampling text from the model while it is spread over ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel import full_sequences
from pretrain.data import end_of_document, load_tokenizer
from pretrain.job import Job
from pretrain.spec import SampleConfig
from pretrain.train.evaluate import inference


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
    last = 0 if job.parallel_model.pipeline is None else job.parallel_model.pipeline.last_place
    source = last * (job.runtime.world // job.topology.pp)
    with inference(job.parallel_model), full_sequences(job.model):
        for _ in range(sample.tokens):
            job.runtime.heartbeat.beat("evaluate", job.spec.train.steps)
            known = tokens[-job.spec.data.seq_len :]
            # Ranks of tensor parallelism have equal parts. What follows a token does not change it,
            # but where experts have a capacity, or choose: then the padding takes part.
            padding = [end] * (-len(known) % job.topology.tp)
            window = torch.tensor([known + padding], device=job.runtime.device)
            # One document, but for the end token that an empty prompt begins with.
            logits, _ = job.forward(window, job.local_batch.documents(window))
            token = end
            if logits is not None:
                token = _next_token(_whole(logits[0, len(known) - 1]), sample, generator)
            token = job.runtime.broadcast(token, source)
            if token == end:
                break
            tokens.append(token)
    return str(tokenizer.decode(tokens))
