"""The sampler is the trainer: of exact runs, log-probabilities of sampled tokens have the bits of a
forward of training, on any layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from corpus.tokenizer import load_tokenizer
from pretrain.spec import JobSpec, SampleConfig
from pretrain.state import Progress
from pretrain.train.generation import Drawing, Generated, generate
from tests.support.exact import LATENT, exact_spec
from tests.support.jobs import data_of, prepare_job, restored_job, save_loud
from tests.support.layouts import topology_of
from tests.support.ranks import run_ranks

SEQ_LEN = 128
PROMPTS = ["import os", "def f(x):\n    return", "", "class A:\n" * 4]
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "latent": {"model": LATENT, "moe": {"top_k": 4, "score_func": "sigmoid"}},
    "bfloat16": {"precision": {"compute": "bfloat16"}, "moe": {"top_k": 3, "ffn_bias": True}},
    "loop": {"moe": {"backend": "loop", "top_k": 3}},
}
LAYOUTS = ["dp_shard=1", "dp_shard=2,ep=2", "pp=2", "dp_replicate=2", "cp=2,ep=2", "tp=2,ep=2"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("sampler")))


def spec_of(folder: Path, data: dict[str, str], variant: str, layout: str) -> JobSpec:
    return exact_spec(folder, data, layout, **VARIANTS[variant], **{"data": {"seq_len": SEQ_LEN}})


def _prompt_of(words: Tokenizer, count: int) -> str:
    """A text of so many tokens."""
    text = "".join(chr(ord("a") + i % 26) + " " for i in range(200))
    lengths = (n for n in range(len(text)) if len(words.encode(text[:n])) == count)
    return text[: next(lengths)]


def _sampled(spec: JobSpec, tokens: int, rank: int) -> list[Generated]:
    job, words = restored_job(spec), load_tokenizer(spec.data)
    # Behind a block of 32 queries attention has one of few, whose products have other bits.
    prompts = [*PROMPTS, *(_prompt_of(words, 32 + few) for few in (1, 2, 3))]
    settings = [SampleConfig(tokens=tokens, prompt=prompt) for prompt in prompts]
    texts = [generate(job, words, one_prompt, Drawing(1.0, 1.0)) for one_prompt in settings]
    job.runtime.close()
    return texts


def _trained(spec: JobSpec, texts: list[list[int]], rank: int) -> list[list[float]]:
    """The log-probability of each token but the first in forwards of training, in batches with
    other sequences."""
    job = restored_job(spec)
    job.model.train()
    wanted = []
    for number, text in enumerate(texts):
        draw = torch.Generator().manual_seed(number)
        batch_BS = torch.randint(8, 300, (3, SEQ_LEN), generator=draw)
        batch_BS[number % 3, : len(text)] = torch.tensor(text)
        out, _ = job.forward(batch_BS)
        assert out is not None
        assert out.logits.requires_grad
        probs = out.logits[number % 3].detach().float().log_softmax(-1)
        wanted.append([float(probs[i, token]) for i, token in enumerate(text[1:])])
    job.runtime.close()
    return wanted


def check(folder: Path, data: dict[str, str], variant: str, layouts: list[str], tokens: int) -> int:
    """Compare layouts with a forward of training on one rank; returns how many tokens."""
    spec = partial(spec_of, folder, data, variant)
    run_ranks(partial(save_loud, spec("dp_shard=1"), 6.0, Progress(step=1)), 1, group=False)
    samples = {
        layout: run_ranks(
            partial(_sampled, spec(layout), tokens), topology_of(layout).world, group=False
        )
        for layout in layouts
    }
    ((first, *_), *_) = samples.values()
    token_ids = [text.token_ids for text in first]
    (wanted,) = run_ranks(partial(_trained, spec("dp_shard=1"), token_ids), 1, group=False)
    for layout, ranks in samples.items():
        for texts in ranks:
            for text, log_probs in zip(texts, wanted, strict=True):
                assert text.log_probs, layout
                assert list(text.log_probs) == log_probs[-len(text.log_probs) :], layout
    return sum(len(text.log_probs) for text in first)


@pytest.mark.parametrize("variant", ["grouped"])
def test_sampled_tokens_have_the_log_probabilities_of_training(data, tmp_path, variant):
    assert check(tmp_path, data, variant, ["dp_shard=2,ep=2"], 30) > 60


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_sampled_tokens_have_the_log_probabilities_of_training_on_any_layout(
    data, tmp_path, variant
):
    assert check(tmp_path, data, variant, LAYOUTS, 50) > 60
