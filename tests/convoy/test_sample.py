"""``convoy sample``, and the cache of keys and values that generation keeps."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
import torch

from convoy.commands.command_line import main
from corpus.tokenizer import load_tokenizer
from moe import MoEConfig
from parallel import full_sequences, parse_topology
from pretrain.parallelize import RoutedTokens
from pretrain.spec import JobSpec, SampleConfig
from pretrain.state import Progress
from pretrain.train.generation import Drawing, Generated, _Writer, generate, next_token
from tests.pretrain.model.test_documents import KINDS, decoder
from tests.support.hf import load_ours, make_model, run, tokens
from tests.support.jobs import make_spec, prepare_job, restored_job, save_loud
from tests.support.ranks import run_ranks

SLOW = pytest.mark.slow
PROMPTS = ["import os", "def f(x):\n    return", ""]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [[9], [4, 1, 1, 3], [1] * 9])
def test_logits_with_a_cache_are_those_of_the_sequence(kind, pieces):
    model, tokens = decoder(kind), torch.randint(8, 300, (2, 9))
    with torch.no_grad():
        expected, at = model(tokens).logits, 0
        with full_sequences(model, 9) as cache:
            for size in pieces:
                piece = tokens[:, at : at + size]
                padded = torch.cat([piece, torch.full((2, 3), 5)], 1)  # is written over
                torch.testing.assert_close(
                    model(padded).logits[:, :size], expected[:, at : at + size]
                )
                at += size
                cache.keep(at)
            cache.keep(0)
            torch.testing.assert_close(model(tokens[:, 1:]).logits, model(tokens[:, 1:]).logits)
        torch.testing.assert_close(model(tokens).logits, expected)


def test_the_nucleus_has_the_likeliest_tokens_that_reach_top_p():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).double().log()
    drawn = {}
    for top_p in (1.0, 0.75, 0.7, 0.3):
        drawing = Drawing(temperature=1.0, top_p=top_p)
        noise = torch.from_numpy(np.random.default_rng(0).gumbel(size=(2000, 4)))
        draws = (next_token(logits, drawing, each) for each in noise)
        drawn[top_p] = Counter(draws)
    assert set(drawn[1.0]) == {0, 1, 2, 3}
    assert set(drawn[0.75]) == {1, 2, 3}
    assert set(drawn[0.7]) == {1, 3}
    assert set(drawn[0.3]) == {1}
    assert drawn[0.7][1] / 2000 == pytest.approx(0.4 / 0.7, abs=0.05)


@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3", "glm4_moe", "granitemoeshared"])
def test_greedy_tokens_with_a_cache_are_those_of_transformers(case, tmp_path):
    theirs, prompt = make_model(case), tokens()[:1, :10]
    theirs.save_pretrained(tmp_path / "theirs")
    assert run("import", tmp_path / "theirs", tmp_path / "ours") == 0
    model, found = load_ours(tmp_path / "ours" / "checkpoints"), prompt
    with torch.no_grad(), full_sequences(model, 40) as cache:
        for _ in range(30):
            logits = model(found[:, cache.length :]).logits[0, -1]
            cache.keep(found.shape[1])
            found = torch.cat([found, logits.argmax().reshape(1, 1)], 1)
    wanted = theirs.generate(prompt, max_new_tokens=30, do_sample=False, pad_token_id=0)
    assert found.tolist() == wanted.tolist()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A job's folder with a checkpoint of random weights."""
    folder = prepare_job(tmp_path_factory.mktemp("sample"))
    run_ranks(partial(save_loud, make_spec(folder), 8.0, Progress(step=3)), 1, group=False)
    return folder


def _both_ways(spec: JobSpec, rank: int) -> tuple[list[Generated], list[Generated], int]:
    job, settings, drawing = restored_job(spec), SampleConfig(tokens=50), Drawing(0.9, 0.95)
    words = load_tokenizer(spec.data)
    each = [settings.model_copy(update={"prompt": prompt}) for prompt in PROMPTS]
    cached = [generate(job, words, one, drawing) for one in each]
    rows: list[int] = []
    job.model.register_forward_pre_hook(lambda module, args: rows.append(args[0].shape[1]))
    generate(job, words, each[0], drawing)
    with patch.object(MoEConfig, "independent_tokens", False):
        again = [generate(job, words, one, drawing) for one in each]
    job.runtime.close()
    return cached, again, rows.count(1)


def test_text_with_a_cache_is_that_of_the_sequence_computed_again(saved):
    """Of more tokens than the view has."""
    ((cached, again, of_one_token),) = run_ranks(partial(_both_ways, make_spec(saved)), 1,
                                                 group=False)  # fmt: skip
    assert [one.token_ids for one in cached] == [one.token_ids for one in again]
    for one, other in zip(cached, again, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert [one.tokens for one in cached] == [50] * 3
    assert of_one_token > 40, "tokens are computed once, but where the view moves"


def sampled(capsys, *words: str) -> list[str]:
    assert main("sample", [*words, "--json"]) == 0
    return [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()]


def test_the_command_prints_what_the_run_would(saved, capsys):
    root = str(saved / "run" / "checkpoints")
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    greedy = sampled(capsys, root, *prompts, "--temperature", "0", "--tokens", "12")
    assert [text.startswith(prompt) for text, prompt in zip(greedy, PROMPTS, strict=True)]
    assert greedy == sampled(capsys, root, *prompts, "--temperature", "0", "--tokens", "12",
                             "--seed", "5")  # fmt: skip
    drawn = [sampled(capsys, root, "--prompt", "a", "--seed", seed) for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    assert (
        main("sample", [root, "--prompt", "import os", "--temperature", "0", "--tokens", "12"]) == 0
    )
    assert capsys.readouterr().out == greedy[0] + "\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--top-p", "0"], "--top-p (0.0) must be above 0"),
        (["--tokens", "0"], "--tokens (0) must be at least 1"),
        (["--step", "9"], "step 9"),
        (["--set", "parallel.ep=3"], "parallel.ep (3)"),
        (["--tokenizer", "nowhere.json"], "nowhere.json cannot be read"),
        (["--tokenizer", "OTHER"], "is not that of the checkpoint"),
        (["--set", "data.path=elsewhere"], "name the tokenizer.json of the model with --tokenizer"),
    ],
)  # fmt: skip
def test_what_cannot_be_sampled_is_told_in_a_line(saved, tmp_path, capsys, words, message):
    other = json.loads((saved / "corpus" / "tokenizer.json").read_text())
    other["model"]["merges"] = other["model"]["merges"][:-1]
    (tmp_path / "other.json").write_text(json.dumps(other))
    words = [str(tmp_path / "other.json") if word == "OTHER" else word for word in words]
    try:
        code = main("sample", [str(saved / "run" / "checkpoints"), *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    told = capsys.readouterr().err.strip()
    assert message in told
    assert "\n" not in told


def _on_rank(root: str, settings: list[str], rank: int) -> list[str]:
    from convoy.sampling import sample

    found = sample(root, PROMPTS, tokens=40, temperature=0.0, overrides=settings)
    return [one.text for one in found]


LAYOUTS = ["dp_shard=2,ep=2", "dp_replicate=2", "tp=2,ep=2", "cp=2,ep=1", "pp=2", "pp=2,tp=2,ep=2"]


@SLOW
@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_is_that_of_one_process_on_any_layout(saved, layout):
    root = str(saved / "run" / "checkpoints")
    (one,) = run_ranks(partial(_on_rank, root, []), 1, group=False)
    settings = [f"parallel.{each}" for each in layout.split(",")]
    for texts in run_ranks(partial(_on_rank, root, settings), parse_topology(layout).world,
                           group=False):  # fmt: skip
        assert texts == one


@pytest.mark.parametrize("rank", [0, 1])
def test_padding_to_the_degree_of_tensor_parallelism_is_no_token(rank):
    calls: list[tuple[torch.Tensor, RoutedTokens | None]] = []
    job = SimpleNamespace(
        runtime=SimpleNamespace(device=torch.device("cpu"), broadcast_all=lambda ids, _: ids),
        local_batch=SimpleNamespace(tp_degree=2),
        dims=SimpleNamespace(tp_mesh=SimpleNamespace(get_local_rank=lambda: rank)),
        forward=lambda x, routed=None: calls.append((x, routed)) or (None, None),
    )
    writer = _Writer.__new__(_Writer)
    writer.job, writer.end_id, writer.source, writer.like_whole = job, 7, 0, False
    for token_ids in ([1, 2, 3, 4], [1, 2, 3]):
        writer._next_token(token_ids)
    (even, nothing), (odd, routed) = calls
    assert (even.tolist(), nothing) == ([[1, 2, 3, 4]], None)
    assert odd.tolist() == [[1, 2, 3, 7]]
    assert routed.token_mask_BS.tolist() == ([[True, True]] if rank == 0 else [[True, False]])
    assert routed.tokens == 2 - rank
