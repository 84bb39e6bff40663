"""Best-fit packing and targets at boundaries, against brute force."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.preparation import prepare_corpora
from corpus.config import DataConfig
from corpus.manifest import CorpusManifest
from corpus.prepare.prepare import prepare_corpus
from corpus.prepare.shards import ShardWriter
from corpus.tokenizer import end_of_document, load_tokenizer
from pretrain.data.best_fit import BestFitSequences, best_fit, cut, pack_corpus, packing_folder
from pretrain.data.corpora import open_corpora
from pretrain.data.sequences import PackedSequences, WithoutBoundaryTargets, read_batch
from pretrain.data.verify import verify_corpus
from pretrain.errors import InputError
from pretrain.parallelize.micro_batches import LocalBatch, forward_backward
from pretrain.spec.read import load_spec
from tests.support.jobs import events, write_spec
from tests.support.ranks import run_ranks

VOCAB, S = 300, 32


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(2, 12), st.booleans())
def test_every_token_but_a_documents_first_is_a_target_once(sizes, length, goes_on):
    tokens = sum(sizes)
    ends = np.cumsum(sizes)[: len(sizes) - goes_on]
    pieces, cut_documents = cut(ends, tokens, length)
    targets = sorted(t for start, size in pieces.tolist() for t in range(start + 1, start + size))
    starts = {0, *np.cumsum(sizes).tolist()}
    assert targets == [t for t in range(tokens) if t not in starts]
    assert all(2 <= size <= length for _, size in pieces.tolist())
    for start, size in pieces.tolist():
        inside = set(range(start + 1, start + size))
        assert not inside & starts, "a piece is of one document"
    assert cut_documents == sum(size > length for size in sizes)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 30))
def test_each_piece_is_in_the_fullest_sequence_with_room(sizes, length):
    found, count = best_fit(np.array(sizes), length)
    left: dict[int, int] = {}
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rooms = [room for room in left.values() if room >= sizes[piece]]
        sequence = int(found[piece])
        if rooms:
            assert left[sequence] == min(rooms)
        else:
            assert sequence not in left
        left[sequence] = left.get(sequence, length) - sizes[piece]
    assert sorted(left) == list(range(count))
    assert min(left.values()) >= 0


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packing")
    (folder / "text").mkdir()
    texts = [f"number {i}. " + "words and words " * (i % 9) for i in range(200)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text" / "a.jsonl").write_text(lines)
    data = DataConfig(
        source=str(folder / "text"), path=str(folder / "corpus"), seq_len=S, shard_tokens=2500,
        packing="best_fit",
    )  # fmt: skip
    return data, prepare_corpus(data, VOCAB, lambda _: None)


def test_a_corpus_is_packed_once_and_its_sequences_have_every_document(prepared):
    data, corpus = prepared
    said: list[str] = []
    packing = pack_corpus(data, corpus, said.append)
    assert pack_corpus(data, corpus, said.append) == packing
    assert "% padding; " in said[0]
    sequences = BestFitSequences(data, corpus)
    rows = sequences.read(range(len(sequences)))
    assert (rows < 0).sum() == packing.padding
    assert packing.padding_share < 0.1
    # All pairs of an input and its target within documents, against the shards themselves.
    end = end_of_document(load_tokenizer(data))
    found: list[tuple[int, int]] = []
    for row in rows:
        pairs = zip(row[:-1].tolist(), row[1:].tolist(), strict=True)
        found += [(a, b) for a, b in pairs if b >= 0 and a != end]
    expected: list[tuple[int, int]] = []
    for shard in corpus.train:
        tokens = np.fromfile(Path(data.path) / shard.file, corpus.dtype).tolist()
        expected += [(a, b) for a, b in pairwise(tokens) if a != end]
    assert sorted(found) == sorted(expected), "also where a shard cuts a document"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 25), min_size=2, max_size=30), st.integers(2, 60), st.integers(4, 12)
)
def test_no_document_follows_another_without_an_end_token(sizes, shard_tokens, seq_len):
    """Token 0 ends a document; the others are numbered through."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        documents = [[*range(1 + 30 * i, 1 + 30 * i + size), 0] for i, size in enumerate(sizes)]
        tokens = np.array([token for document in documents for token in document], "<u2")
        writer = ShardWriter(folder, "train", shard_tokens, lambda raw: None)
        writer.write(tokens, np.cumsum([len(document) for document in documents]))
        corpus = CorpusManifest.model_construct(
            version=2, dtype="uint16", train=writer.close(), fingerprint="0"
        )
        data = DataConfig(source="x", path=name, seq_len=seq_len, packing="best_fit")
        pack_corpus(data, corpus, lambda _: None)
        sequences = BestFitSequences(data, corpus)
        rows = read_batch(sequences, range(len(sequences))).tolist()
        seen = []
        for row in rows:
            for a, b in pairwise(row):
                if a > 0 and b >= 0:
                    assert b in (a + 1, 0), "one document, up to its end token"
                    seen.append((a, b))
        shards = [np.fromfile(folder / s.file, "<u2").tolist() for s in corpus.train]
        wanted = [(a, b) for shard in shards for a, b in pairwise(shard) if a]
        assert sorted(seen) == sorted(wanted), "each target once"


def test_a_packing_of_another_corpus_or_none_is_refused(prepared, tmp_path):
    data, corpus = prepared
    pack_corpus(data, corpus, lambda _: None)
    with pytest.raises(
        InputError, match=r"needs .*best-fit-16, which convoy prepare makes: No such"
    ):
        BestFitSequences(data.model_copy(update={"seq_len": 16}), corpus)
    other = corpus.model_copy(update={"fingerprint": "0"})
    with pytest.raises(InputError, match=r"best-fit-32 is of another corpus; remove it to pack"):
        BestFitSequences(data, other)
    path = next(Path(packing_folder(data)).glob("*.pieces"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(InputError, match=r"pieces has .* bytes, its manifest says .*best-fit-32 t"):
        BestFitSequences(data, corpus)
    path.write_bytes(whole)


def test_verify_reads_the_packings_of_a_corpus(prepared):
    data, corpus = prepared
    pack_corpus(data, corpus, lambda _: None)
    folder = Path(packing_folder(data))
    before = verify_corpus(data.path, corpus)
    pieces, packing = folder / "train-00001.pieces", folder / "packing.json"
    whole, text = pieces.read_bytes(), packing.read_text()
    pieces.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=r"train-00001.pieces is damaged: its SHA-256 is "):
        verify_corpus(data.path, corpus)
    pieces.write_bytes(whole)
    packing.write_text(text.replace('"padding": ', '"padding": 1'))
    for check in (verify_corpus, lambda _, corpus: BestFitSequences(data, corpus)):
        with pytest.raises(InputError, match=r"packing.json that was changed after it was written"):
            check(data.path, corpus)
    packing.write_text(text)
    assert verify_corpus(data.path, corpus) == before


def test_the_first_token_of_a_document_is_no_target_where_the_spec_says_so(prepared):
    data, corpus = prepared
    end = end_of_document(load_tokenizer(data))
    plain = read_batch(PackedSequences(data, corpus, "train"), range(20))
    masked = read_batch(
        WithoutBoundaryTargets(PackedSequences(data, corpus, "train"), end), range(20)
    )
    inputs, targets = LocalBatch(masked_targets=True).inputs_and_targets(masked)
    assert torch.equal(inputs, plain[:, :-1])
    after_end = plain[:, :-1] == end
    assert after_end.any()
    assert torch.equal(targets, torch.where(after_end, -1, plain[:, 1:]))
    documents = LocalBatch(end_token=end, masked_targets=True).documents(masked[:, :-1])
    expected = LocalBatch(end_token=end).documents(plain[:, :-1])
    assert torch.equal(documents.numbers_BW, expected.numbers_BW)


class Logits(torch.nn.Module):
    """A model of one table: logits of the next token from the token alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB))

    def forward(self, inputs, counts, documents, token_mask=None):
        from pretrain.model import DecoderOutput

        return DecoderOutput(logits=self.table[inputs], aux=[])


def test_masked_and_padded_targets_are_not_in_the_loss(prepared):
    data, corpus = prepared
    pack_corpus(data, corpus, lambda _: None)
    end = end_of_document(load_tokenizer(data))
    batch = read_batch(WithoutBoundaryTargets(BestFitSequences(data, corpus), end), range(6))
    model = Logits()
    result = forward_backward(
        model, [batch[:4], batch[4:]], 100.0, device=torch.device("cpu"),
        local_batch=LocalBatch(masked_targets=True),
    )  # fmt: skip
    nats, count = 0.0, 0
    for row in batch.tolist():
        tokens = [~t if t < 0 else t for t in row]
        for i in range(S):
            if row[i + 1] >= 0:
                logits = model.table.detach()[tokens[i]]
                nats -= float(logits.log_softmax(0)[tokens[i + 1]])
                count += 1
                assert tokens[i] != end
    assert result.target_tokens == count < 6 * S
    assert float(result.loss_sum) == pytest.approx(nats, rel=1e-5)


def train_on_rank(rank: int, arguments: list[str]) -> int:
    from convoy.commands.pretrain import main

    return main(arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    ["", "pp=2", "dp_shard=2", "cp=2", "tp=2"],
)
def test_a_run_with_packed_documents(tmp_path, layout):
    (tmp_path / "text").mkdir()
    texts = [f"number {i}. " + "words and words " * (i % 9) for i in range(300)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "text" / "a.jsonl").write_text(lines)
    packed = {
        "source": str(tmp_path / "text"), "path": str(tmp_path / "corpus"),
        "packing": "best_fit", "mask_boundary_labels": True, "document_mask": True,
    }  # fmt: skip
    spec = write_spec(tmp_path, data=packed, train={"steps": 3}, eval={"sequences": 2})
    values = json.loads(spec.read_text())
    data, vocab_size = load_spec(spec).data, values["model"]["vocab_size"]
    corpora = prepare_corpora(data, vocab_size, lambda _: None)
    assert open_corpora(data, vocab_size) == corpora
    for where, ranks, overrides in (("one", 1, []), ("many", 2, [f"parallel.{layout}"])):
        arguments = [str(spec), "--set", f"run_dir={tmp_path / where}"]
        for override in overrides if layout else []:
            arguments += ["--set", override]
        if where == "one" or layout:
            assert set(run_ranks(train_on_rank, ranks, arguments, group=False)) == {0}
    steps = events(tmp_path / "one", "step")
    assert all(step["target_tokens"] < step["samples"] * 32 for step in steps)
    (both, last) = events(tmp_path / "one", "interval")
    targets = [step["target_tokens"] for step in steps]
    assert both["padding"] == pytest.approx(1 - sum(targets[:2]) / (2 * 8 * 32))
    assert last["padding"] == pytest.approx(1 - targets[2] / (8 * 32))
    if layout:
        many = events(tmp_path / "many", "step")
        for a, b in zip(steps, many, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)
            assert (a["target_tokens"], a["data_checksum"]) == (
                b["target_tokens"],
                b["data_checksum"],
            )
        logs = (events(tmp_path / name, "interval") for name in ("one", "many"))
        for a, b in zip(*logs, strict=True):
            assert a["aux_loss"] == pytest.approx(b["aux_loss"], rel=1e-3)
            assert a["aux_losses"] == pytest.approx(b["aux_losses"], rel=1e-3)
            assert a["padding"] == b["padding"]
