"""Corpora, packed sequences and the one global order."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from corpus.config import DataConfig
from corpus.documents.documents import find_documents, is_held_out
from corpus.manifest import open_corpus
from corpus.prepare.prepare import prepare_corpus
from corpus.tokenizer import bytes_per_token, end_of_document, load_tokenizer
from pretrain.data.division import Division
from pretrain.data.loader import Cursor, Loader, micro_batches
from pretrain.data.order import GlobalOrder
from pretrain.data.sequences import PackedSequences, read_batch
from pretrain.errors import InputError
from tests.support.jobs import write_corpus

VOCAB = 300


def config(folder, **fields) -> DataConfig:
    values = {"source": str(folder / "text"), "path": str(folder / "corpus"), "seq_len": 32}
    return DataConfig(**{**values, "shard_tokens": 5000, **fields})


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_corpus(folder / "text")
    data = config(folder)
    return data, prepare_corpus(data, VOCAB, lambda _: None)


def read_split(data, corpus, split) -> np.ndarray:
    from pathlib import Path

    shards = corpus.train if split == "train" else corpus.val
    return np.concatenate(
        [np.fromfile(Path(data.path) / s.file, dtype=corpus.dtype) for s in shards]
    )


def test_tokens_are_the_documents_end_to_end(prepared):
    data, corpus = prepared
    tokenizer = load_tokenizer(data)
    end = end_of_document(tokenizer)
    documents = list(find_documents(data.source))
    assert corpus.train_documents + corpus.val_documents == len(documents)
    for split in ("train", "val"):
        expected = [d for d in documents if is_held_out(d) == (split == "val")]
        assert expected
        tokens = read_split(data, corpus, split)
        ends = np.flatnonzero(tokens == end)
        pieces = np.split(tokens, ends + 1)[:-1]
        assert len(pieces) == len(expected)
        for piece, document in zip(pieces, expected, strict=True):
            assert tokenizer.decode(piece[:-1].tolist()) == document.text


def test_bytes_per_token_add_up_to_the_text(prepared):
    data, corpus = prepared
    lengths = bytes_per_token(load_tokenizer(data), VOCAB)
    assert len(lengths) == VOCAB
    for split, size in (("train", corpus.train_bytes), ("val", corpus.val_bytes)):
        assert lengths[read_split(data, corpus, split).astype(int)].sum() == size


def test_each_training_token_is_in_one_sequence_and_targets_follow_inputs(prepared):
    data, corpus = prepared
    sequences = PackedSequences(data, corpus, "train")
    position = 0
    tokens = read_split(data, corpus, "train")
    index = 0
    for shard in corpus.train:
        for i in range((shard.tokens - 1) // 32):
            start = position + i * 32
            assert np.array_equal(sequences[index], tokens[start : start + 33])
            index += 1
        position += shard.tokens
    assert index == len(sequences)
    assert read_batch(sequences, []).shape == (0, 33)
    assert read_batch(sequences, [3, 1]).shape == (2, 33)


def test_every_held_out_token_but_the_first_of_a_shard_is_a_target_once(prepared):
    data, corpus = prepared
    sequences = PackedSequences(data, corpus, "val", whole=True)
    targets = np.concatenate([sequences[i][1:] for i in range(len(sequences))])
    starts = np.cumsum([0, *(s.tokens for s in corpus.val[:-1])])
    expected = np.delete(read_split(data, corpus, "val"), starts)
    assert np.array_equal(targets[targets >= 0], expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 5))
def test_each_epoch_is_a_permutation_and_no_two_are_alike(count, seed):
    order = GlobalOrder(count, seed)
    epochs = [[order[e * count + i] for i in range(count)] for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(count))
    if count > 20:
        assert epochs[0] != epochs[1] != epochs[2]
        assert epochs[0] != list(range(count))
        assert epochs[0] != [GlobalOrder(count, seed + 1)[i] for i in range(count)]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40), st.integers(1, 12), st.integers(1, 9))
def test_ranks_together_take_the_step_once_whatever_their_number(start, size, micro, ranks):
    cursor = Cursor(start)
    every = [micro_batches(cursor, size, micro, r, ranks) for r in range(ranks)]
    assert len({len(mine) for mine in every}) == 1, "all join the same collectives"
    taken = sorted(i for mine in every for batch in mine for i in batch)
    assert taken == list(range(start, start + size))
    parts = {b for mine in every for b in mine if len(b)}
    alone = {b for b in micro_batches(cursor, size, micro, 0, 1) if len(b)}
    assert parts == alone, "a micro-batch does not depend on the ranks"


def test_the_loader_takes_samples_in_the_global_order(prepared):
    data, corpus = prepared
    sequences = PackedSequences(data, corpus, "train")
    order = GlobalOrder(len(sequences), 3)
    loader = Loader(sequences, order, lambda _: 6, 4, 0, 1)
    batches, cursor = loader.step(Cursor(12))
    assert [len(b) for b in batches] == [4, 2]
    assert cursor == Cursor(18)
    seen = np.concatenate(batches)
    assert np.array_equal(seen, np.stack([sequences[order[i]] for i in range(12, 18)]))


@pytest.mark.parametrize(("lockstep", "sizes"), [(True, [2, 0, 0]), (False, [2])])
def test_a_slow_rank_joins_only_collectives_that_there_are(prepared, lockstep, sizes):
    """An empty micro-batch costs a forward and a backward."""
    data, corpus = prepared
    sequences = PackedSequences(data, corpus, "train")
    order = GlobalOrder(len(sequences), 3)
    loaders = [Loader(sequences, order, lambda _: 8, 2, r, 2) for r in range(2)]
    for loader in loaders:
        loader.division = Division(2, lockstep=lockstep, min_gain=0.0, speeds=(1.0, 0.25))
    batches = [loader.step(Cursor(4))[0] for loader in loaders]
    assert [[len(b) for b in each] for each in batches] == [[2, 2, 2], sizes]
    seen = sorted(tuple(row.tolist()) for each in batches for b in each for row in b)
    assert seen == sorted(tuple(sequences[order[i]].tolist()) for i in range(4, 12))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_loader_takes_the_next_samples_in_the_place_of_skipped_ones(prepared, ranks):
    data, corpus = prepared
    sequences = PackedSequences(data, corpus, "train")
    order = GlobalOrder(len(sequences), 3)
    skipped = [(4, 8), (12, 14), (15, 16)]
    loaders = [Loader(sequences, order, lambda i: 6 if i < 20 else 5, 2, r, ranks)
               for r in range(ranks)]  # fmt: skip
    cursor, taken = Cursor(12), []
    for _ in range(2):
        taken.append(loaders[0].samples(cursor, skipped))
        steps = [loader.step(cursor, skipped) for loader in loaders]
        rows = sorted(tuple(row.tolist()) for batches, _ in steps for b in batches for row in b)
        assert rows == sorted(tuple(sequences[order[i]].tolist()) for i in taken[-1])
        assert {after for _, after in steps} == {Cursor(taken[-1][-1] + 1)}
        cursor = steps[0][1]
    assert [list(samples) for samples in taken] == [[14, 16, 17, 18, 19, 20], [*range(21, 26)]]


def test_a_prepared_corpus_is_used_again_and_never_mistaken(prepared):
    data, corpus = prepared
    assert prepare_corpus(data, VOCAB) == corpus
    for change, message in [
        ({"source": "stdlib"}, "was prepared with source .* the spec says stdlib"),
        ({"shard_tokens": 6000}, "was prepared with shard_tokens 5000, the spec says 6000"),
    ]:
        with pytest.raises(InputError, match=message):
            open_corpus(data.model_copy(update=change), VOCAB)
    with pytest.raises(InputError, match="was prepared with vocab_size 300, the spec says 400"):
        open_corpus(data, 400)


def test_jsonl_and_globs(tmp_path):
    folder = tmp_path / "text" / "deep"
    folder.mkdir(parents=True)
    lines = [{"text": f"document {i}", "other": 1} for i in range(50)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    (folder / "b.md").write_text("plain")
    (folder / "empty.txt").write_text("")
    (folder / "binary.bin").write_bytes(b"a\0b")
    (folder / ".hidden").write_text("no")
    found = list(find_documents(str(tmp_path / "text")))
    assert [d.text for d in found[:50]] == [line["text"] for line in lines]
    assert [d.name for d in found[49:]] == ["deep/a.jsonl#50", "deep/b.md"]
    assert [d.name for d in find_documents(str(tmp_path / "text" / "**" / "*.md"))] == ["deep/b.md"]
    assert [d.text for d in find_documents(str(folder / "b.md"))] == ["plain"]

    (folder / "a.jsonl").write_text('{"text": "good"}\n{"text": 3}\n')
    with pytest.raises(InputError, match=r"a.jsonl line 2 must be a JSON object with a text"):
        list(find_documents(str(tmp_path / "text")))


@pytest.mark.slow
def test_the_stdlib_is_found_without_site_packages():
    found = list(find_documents("stdlib"))
    names = [d.name for d in found]
    assert "json/decoder.py" in names
    assert not [n for n in names if "site-packages" in n or "__pycache__" in n]
    held_out = sum(is_held_out(d) for d in found)
    assert 0.03 < held_out / len(names) < 0.07


def test_the_end_of_a_document_spelt_out_in_a_text_is_text(tmp_path):
    (tmp_path / "text").mkdir()
    texts = ["before <|endoftext|> after", "hello", "half a pair"]
    lines = [{"text": text} for text in texts]
    lines[2]["text"] += "\ud800"
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = config(tmp_path, seq_len=2)
    corpus = prepare_corpus(data, VOCAB, lambda _: None)
    tokenizer = load_tokenizer(data)
    tokens = np.concatenate([read_split(data, corpus, s) for s in ("train", "val")])
    assert (tokens == end_of_document(tokenizer)).sum() == 3
    lengths = bytes_per_token(tokenizer, VOCAB)
    assert lengths[tokens.astype(int)].sum() == corpus.train_bytes + corpus.val_bytes
    assert end_of_document(tokenizer) not in tokenizer.encode(texts[0]).ids


def test_a_half_made_corpus_of_another_process_is_left_alone(tmp_path):
    write_corpus(tmp_path / "text", 10)
    other = tmp_path / ".corpus.0123abcd"
    other.mkdir()
    (other / "train-00000.bin").write_bytes(b"..")
    prepare_corpus(config(tmp_path), VOCAB, lambda _: None)
    assert (other / "train-00000.bin").exists()
    assert [p.name for p in tmp_path.glob(".corpus.*")] == [other.name]


def test_unusable_corpora_are_one_line_and_leave_nothing(tmp_path):
    (tmp_path / "text").mkdir()
    with pytest.raises(InputError, match=r"must have at least 2 documents .* it has 0"):
        prepare_corpus(config(tmp_path), VOCAB)
    with pytest.raises(InputError, match=r"data.source \(/no/where\) must be stdlib, or a folder"):
        prepare_corpus(config(tmp_path, source="/no/where"), VOCAB)
    for i in range(3):
        (tmp_path / "text" / f"{i}.txt").write_text(f"hello {i}")
    data = config(tmp_path)
    corpus = prepare_corpus(data, VOCAB, lambda _: None)
    assert corpus.val_documents == 1, "something is always held out"
    with pytest.raises(InputError, match=r"data.seq_len \(32\) must be less than the tokens of"):
        PackedSequences(data, corpus, "train")

    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="cannot be prepared: Not a directory"):
        prepare_corpus(config(tmp_path, path=str(blocked / "corpus")), VOCAB, lambda _: None)
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="must be a prepared corpus or not exist"):
        prepare_corpus(config(tmp_path, path=str(tmp_path / "other")), VOCAB)
    assert not list(tmp_path.glob(".corpus.*")), "half a corpus was left"


def test_empty_texts_are_no_documents(tmp_path):
    (tmp_path / "text").mkdir()
    lines = [{"text": ""}] * 400 + [{"text": "one"}, {"text": "two"}]
    (tmp_path / "text" / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    corpus = prepare_corpus(config(tmp_path, seq_len=2), VOCAB, lambda _: None)
    assert (corpus.train_documents, corpus.val_documents) == (1, 1)
    assert corpus.val_bytes == 3


def test_files_that_cannot_be_read_or_have_odd_names(tmp_path):
    folder = write_corpus(tmp_path / "text", 10)
    (folder / os.fsdecode(b"caf\xe9.txt")).write_text("named in another encoding")
    assert len(list(find_documents(str(folder)))) == 11
    prepare_corpus(config(tmp_path), VOCAB, lambda _: None)
    (folder / "memory.txt").symlink_to("/proc/self/mem")
    with pytest.raises(InputError, match=r"memory.txt cannot be read: "):
        list(find_documents(str(folder)))


@pytest.mark.parametrize("damage", [None, "{}"])
def test_a_corpus_without_its_tokenizer_is_told_at_once(tmp_path, damage):
    write_corpus(tmp_path / "text", 10)
    data = config(tmp_path)
    prepare_corpus(data, VOCAB, lambda _: None)
    path = tmp_path / "corpus" / "tokenizer.json"
    path.unlink()
    if damage is not None:
        path.write_text(damage)
    with pytest.raises(InputError, match=r"tokenizer.json cannot be read: "):
        open_corpus(data, VOCAB)


def test_a_shortened_shard_is_refused(tmp_path):
    write_corpus(tmp_path / "text", 10)
    data = config(tmp_path)
    corpus = prepare_corpus(data, VOCAB, lambda _: None)
    path = tmp_path / "corpus" / corpus.train[0].file
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(
        InputError, match=r"train-00000.bin has 9998 bytes, its manifest says 10000"
    ):
        PackedSequences(data, corpus, "train")


def test_what_was_read_ahead_is_taken_for_that_step_only(prepared):
    data, corpus = prepared
    sequences = PackedSequences(data, corpus, "train")
    loader = Loader(sequences, GlobalOrder(len(sequences), 3), lambda _: 6, 4, 0, 1)
    alone = Loader(
        sequences, GlobalOrder(len(sequences), 3), lambda _: 6, 4, 0, 1, read_ahead=False
    )
    asked = [(0, ()), (6, ()), (6, ()), (12, ((13, 15),)), (0, ()), (6, ())]
    for cursor, skipped in asked:  # a step that is tried again, one with skips, and a way back
        found, after = loader.step(Cursor(cursor), skipped)
        expected, then = alone.step(Cursor(cursor), skipped)
        assert after == then
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
