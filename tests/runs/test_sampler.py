"""The sampler is the trainer: of exact runs, log-probabilities of sampled tokens have the bits of a
forward of training, on any layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from corpus.tokenizer import load_tokenizer
from pretrain.spec import JobSpec
from pretrain.state import Progress
from tests.support.exact import LATENT, exact_spec
from tests.support.jobs import data_of, prepare_job, save_loud
from tests.support.layouts import topology_of
from tests.support.ranks import run_ranks
from tests.support.sampling import sample_on_rank, trained_log_probs_on_rank

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


def check(folder: Path, data: dict[str, str], variant: str, layouts: list[str], tokens: int) -> int:
    """Compare layouts with a forward of training on one rank; returns how many tokens."""
    spec = partial(spec_of, folder, data, variant)
    words = load_tokenizer(spec("dp_shard=1").data)
    # Behind a block of 32 queries attention has one of few, whose products have other bits.
    prompts = [*PROMPTS, *(_prompt_of(words, 32 + few) for few in (1, 2, 3))]
    run_ranks(partial(save_loud, spec("dp_shard=1"), 6.0, Progress(step=1)), 1, group=False)
    samples = {
        layout: run_ranks(
            partial(sample_on_rank, spec(layout), prompts, tokens),
            topology_of(layout).world,
            group=False,
        )
        for layout in layouts
    }
    ((first, *_), *_) = samples.values()
    train = partial(trained_log_probs_on_rank, spec("dp_shard=1"), first)
    (wanted,) = run_ranks(train, 1, group=False)
    for layout, ranks in samples.items():
        for texts in ranks:
            for text, log_probs in zip(texts, wanted, strict=True):
                assert text.log_probs, layout
                assert list(text.log_probs) == log_probs, layout
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
