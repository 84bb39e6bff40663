"""Training and evaluation with data.document_mask, against every document by itself."""

from __future__ import annotations

import itertools
import json
import random
import sysconfig
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corpus.prepare.prepare import prepare_corpus
from corpus.tokenizer import end_of_document, load_tokenizer
from moe import MoEConfig
from parallel import Documents, apply_recompute, parse_topology
from pretrain.checkpoint.resume import restore
from pretrain.data.sequences import read_batch
from pretrain.job import build_job
from pretrain.model.config import ModelConfig
from pretrain.model.decoder import Decoder
from pretrain.parallelize.micro_batches import LocalBatch, forward_backward, next_token_loss
from pretrain.runtime.ranks import start
from pretrain.spec.job import JobSpec
from pretrain.train.evaluate import evaluate
from pretrain.train.generation import Drawing, generate
from tests.pretrain.model.test_attention import LATENT
from tests.runs.test_layouts import SECTIONS
from tests.support.jobs import make_spec
from tests.support.layouts import Trained, check_gradients, relative_error, spec_for, train
from tests.support.ranks import run_ranks

SLOW = pytest.mark.slow
CPU = torch.device("cpu")
END, W, STEPS = 7, 96, 4
LENGTHS = [[40, 1, 3, 1, 20, 31], [1, 1, 90, 4], [96], [1] * 96]


def sequences() -> Tensor:
    """[4, W + 1]; one without an end token, and one of nothing else."""
    torch.manual_seed(3)
    batch = torch.randint(8, 300, (len(LENGTHS), W + 1))
    for row, lengths in zip(batch, LENGTHS, strict=True):
        row[torch.tensor(lengths).cumsum(0)[:-1] - 1] = END
    batch[3] = END
    return batch


def decoder(kind: str) -> Decoder:
    """With weights of a size at which attention matters, and nothing that counts the batch."""
    torch.manual_seed(5)
    sizes = {"vocab_size": 300, "d_model": 32, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2,
             "d_ff": 48, "first_k_dense": 1}  # fmt: skip
    config = ModelConfig(**sizes | (LATENT if kind == "latent" else {}))
    model = Decoder(config, MoEConfig(d_model=32, d_ff=24, num_experts=6, top_k=2,
                                      aux_loss_coeff=0.0))  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention.w" in name:
                parameter.mul_(2)
    return model


def documents_of(tokens: Tensor) -> Documents:
    return Documents.ended_by(END, tokens)


def alone(model: Decoder, tokens_BW: Tensor) -> Tensor:
    """Logits, of each document by itself from position 0."""
    rows = []
    for row, lengths in zip(tokens_BW, LENGTHS, strict=True):
        pieces = [model(piece.unsqueeze(0)).logits for piece in row.split(lengths)]
        rows.append(torch.cat(pieces, 1))
    return torch.cat(rows)


KINDS = ["grouped", "latent"]


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients_are_those_of_each_document_by_itself(kind):
    model, batch = decoder(kind), sequences()
    inputs, targets = batch[:, :-1], batch[:, 1:]
    expected = alone(model, inputs)
    loss = next_token_loss(expected, targets)
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    logits = model(inputs, None, documents_of(inputs)).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert (logits - model(inputs).logits)[0, 45:].abs().max() > 0.1, "the mask matters"
    model.zero_grad()
    # Of the whole step too: the first token of a document is a target like any other.
    result = forward_backward(model, [batch], 1, device=CPU, local_batch=LocalBatch(end_token=END))
    assert result.target_tokens == batch[:, 1:].numel()
    assert float(result.loss_sum) == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, wanted[name]) < 1e-5, name


@pytest.mark.parametrize("kind", KINDS)
def test_no_document_sees_another(kind):
    model, tokens = decoder(kind), sequences()[:1, :-1]
    documents = documents_of(tokens)
    with torch.no_grad():
        before = model(tokens, None, documents).logits[0]
        start = 0
        for length in LENGTHS[0]:
            changed = tokens.clone()
            changed[0, start] = 299 if length > 1 else 298
            # The same documents, also where it is an end token that changes.
            after = model(changed, None, documents).logits[0]
            moved = (after - before).abs().amax(-1)
            assert moved[start : start + length].min() > 1e-4, "tokens see those before them"
            assert moved[:start].amax() < 1e-5 if start else True
            assert moved[start + length :].amax() < 1e-5 if start + length < W else True
            start += length


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_end_token_nothing_changes(kind):
    model, tokens = decoder(kind), sequences()[2:3, :-1]
    assert not (tokens == END).any()
    with torch.no_grad():
        assert torch.equal(
            model(tokens, None, documents_of(tokens)).logits, model(tokens).logits
        )  # fmt: skip


def test_an_empty_micro_batch_is_ordinary():
    model, batch = decoder("grouped"), sequences()
    part = LocalBatch(end_token=END)
    whole = forward_backward(model, [batch], 100, device=CPU, local_batch=part)
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    more = forward_backward(model, [batch, batch[:0]], 100, device=CPU, local_batch=part)
    assert more.loss_sum == whole.loss_sum
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_gives_the_same_bits(kind):
    found = []
    for how in ("none", "full", "selective"):
        model = decoder(kind)
        apply_recompute(list(model.blocks.values()), how)
        forward_backward(
            model, [sequences()], 100, device=CPU, local_batch=LocalBatch(end_token=END)
        )
        found.append([p.grad for p in model.parameters()])
    for grads in zip(*found, strict=True):
        assert torch.equal(grads[0], grads[1])
        assert torch.equal(grads[0], grads[2])


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Any]:
    """A corpus of documents that are mostly shorter than a sequence of 32 tokens."""
    folder = tmp_path_factory.mktemp("documents")
    text = "".join(p.read_text()[:3000] for p in _modules())
    random.seed(1)
    lines, start = [], 0
    while start < len(text):
        stop = start + random.choice((2, 5, 20, 60, 150))
        lines.append(json.dumps({"text": text[start:stop]}))
        start = stop
    (folder / "text.jsonl").write_text("\n".join(lines))
    data = {"source": str(folder / "text.jsonl"), "path": str(folder / "corpus")}
    spec = make_spec(folder, data=data)
    prepare_corpus(spec.data, spec.model.vocab_size, lambda _: None)
    return {**data, "document_mask": True}


def _modules() -> list[Path]:
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]


@pytest.fixture(scope="module")
def one_process(data, tmp_path_factory) -> Trained:
    return train(spec_for(tmp_path_factory.mktemp("one"), data, "", **SECTIONS), STEPS)


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        ("pp=2", {}),
        ("cp=2", {}),
        pytest.param("cp=2,tp=2", {"memory": {"recompute": "selective"}}, marks=SLOW),
        pytest.param("tp=2", {}, marks=SLOW),
        pytest.param("dp_shard=2,ep=2", {"memory": {"recompute": "full"}}, marks=SLOW),
        pytest.param("cp=2,tp=2", {}, marks=SLOW),
        pytest.param("pp=2,cp=2", {"memory": {"recompute": "full"}}, marks=SLOW),
        pytest.param("pp=2", {"pipeline": {"stages_per_rank": 2}}, marks=SLOW),
        pytest.param("pp=2 zbv", {"memory": {"recompute": "full"}}, marks=SLOW),
        pytest.param("pp=2,cp=2,tp=2,ep=4", {"pipeline": {"schedule": "gpipe"}}, marks=SLOW),
    ],
)
def test_a_layout_trains_as_one_process_does(layout, parallel, one_process, data, tmp_path):
    trained = train(spec_for(tmp_path, data, layout, parallel=parallel, **SECTIONS), STEPS)
    assert trained.losses == pytest.approx(one_process.losses, rel=1e-5)
    assert trained.norms == pytest.approx(one_process.norms, rel=1e-4)
    check_gradients(trained, one_process)


def test_the_mask_makes_another_run(one_process, data, tmp_path):
    plain = train(spec_for(tmp_path, {**data, "document_mask": False}, "", **SECTIONS), STEPS)
    assert relative_error(
        plain.gradients["layers.0.attention.wv.weight"],
        one_process.gradients["layers.0.attention.wv.weight"],
    ) > 0.1  # fmt: skip
    assert plain.losses != pytest.approx(one_process.losses, rel=1e-5)


def evaluate_on_rank(spec: JobSpec, rank: int) -> tuple[float, int, str]:
    """Held-out loss, tokens and text, with weights of a size at which attention matters."""
    job = _job(spec)
    found = evaluate(job)
    text = generate(job, load_tokenizer(spec.data), spec.sample, Drawing(temperature=0)).text
    job.runtime.close()
    return found.loss, found.tokens, text


def _job(spec: JobSpec) -> Any:
    job = build_job(spec, start(spec.train.timeout_seconds))
    restore(job)
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            if "norm" not in name:
                parameter.mul_(8)
    return job


def by_hand_on_rank(spec: JobSpec, rank: int) -> tuple[float, int, str]:
    """The same, of documents cut out of their sequences."""
    job = _job(spec)
    tokenizer = load_tokenizer(spec.data)
    end = end_of_document(tokenizer, spec.data.end_token)
    nats, tokens, documents = 0.0, 0, 0
    with torch.no_grad():
        held_out = job.held_out["corpus"]
        for sequence in read_batch(held_out, range(len(held_out))):
            sequence = sequence[sequence >= 0]
            ends = (sequence[:-1] == end).nonzero().flatten() + 1
            bounds = [0, *ends.tolist(), len(sequence) - 1]
            for a, b in itertools.pairwise(bounds):
                if a < b:
                    logits = job.model(sequence[None, a:b]).logits
                    nats += float(next_token_loss(logits, sequence[None, a + 1 : b + 1]))
                    tokens, documents = tokens + b - a, documents + 1
        assert documents > 2 * len(held_out)
        # The end token that an empty prompt stands for is of the document before.
        text: list[int] = []
        for _ in range(spec.sample.tokens):
            logits = job.model(torch.tensor([text or [end]])).logits
            token = int(logits[0, -1].argmax())
            if token == end:
                break
            text.append(token)
    job.runtime.close()
    return nats / tokens, tokens, tokenizer.decode(text)


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=SLOW) for layout in ("pp=2", "cp=2,tp=2", "cp=2")]
)
def test_evaluation_and_text_are_those_of_documents_by_themselves(layout, data, tmp_path):
    sample = {"prompt": "", "tokens": 6}
    spec, spread = (spec_for(tmp_path, data, each, sample=sample) for each in ("", layout))
    plain = spec_for(tmp_path, {**data, "document_mask": False}, "", sample=sample)
    ((loss, tokens, text),) = run_ranks(partial(by_hand_on_rank, spec), 1, group=False)
    ((unmasked, _, _),) = run_ranks(partial(evaluate_on_rank, plain), 1, group=False)
    for each, ranks in ((spec, 1), (spread, parse_topology(layout).world)):
        for result in run_ranks(partial(evaluate_on_rank, each), ranks, group=False):
            assert result[0] == pytest.approx(loss, rel=1e-5)
            assert result[1:] == (tokens, text)
    assert len(text) > 1
    assert abs(unmasked - loss) > 1e-3 * loss, "the mask matters"
