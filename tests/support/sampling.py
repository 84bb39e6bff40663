"""What a checkpoint samples on ranks, and what forwards of training say of the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from corpus.tokenizer import load_tokenizer
from pretrain.spec import JobSpec, SampleConfig
from pretrain.train.generation import Drawing, Generated, generate
from tests.support.jobs import restored_job

_BATCH = 8
"""Sequences of one forward."""


def sample_on_rank(
    spec: JobSpec, prompts: Sequence[str], tokens: int, rank: int
) -> list[Generated]:
    """What the spec's newest checkpoint samples behind each prompt."""
    job, words = restored_job(spec), load_tokenizer(spec.data)
    settings = [SampleConfig(tokens=tokens, prompt=prompt) for prompt in prompts]
    texts = [generate(job, words, setting, Drawing(1.0, 1.0)) for setting in settings]
    job.runtime.close()
    return texts


def trained_log_probs_on_rank(
    spec: JobSpec, texts: Sequence[Generated], rank: int
) -> list[list[float]]:
    """The log-probabilities of sampled tokens in forwards of training: of whole sequences that
    begin as the texts do and go on at random, several at a time."""
    job = restored_job(spec)
    job.model.train()
    generator, log_probs = torch.Generator().manual_seed(1), []
    for start in range(0, len(texts), _BATCH):
        some = texts[start : start + _BATCH]
        batch_BS = torch.randint(8, 300, (len(some), spec.data.seq_len), generator=generator)
        for row_S, text in zip(batch_BS, some, strict=True):
            row_S[: len(text.token_ids)] = torch.tensor(text.token_ids)
        out, _ = job.forward(batch_BS)
        assert out is not None
        assert out.logits.requires_grad
        for logits_SV, text in zip(out.logits.detach(), some, strict=True):
            first = len(text.token_ids) - len(text.log_probs)
            before_SV = logits_SV[first - 1 : len(text.token_ids) - 1].float().log_softmax(-1)
            sampled = zip(before_SV, text.token_ids[first:], strict=True)
            log_probs.append([float(row_V[token]) for row_V, token in sampled])
    job.runtime.close()
    return log_probs
