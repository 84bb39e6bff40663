"""Samples in another order, twice or never.

Here: what is prepared from documents: what is held out, what is cached, and what packing keeps.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from convoy.preparation import prepare_corpora
from corpus.config import DataConfig
from corpus.errors import InputError
from corpus.tokenizer import end_of_document, load_tokenizer
from pretrain.data import Corpora, Cursor, open_corpora
from tests.museum.cases import Edit, case
from tests.museum.shared_data_order import loader_of
from tests.support.jobs import write_corpus

VOCAB, S = 300, 64


@pytest.fixture(scope="module")
def corpora(tmp_path_factory) -> Corpora:
    """A prepared corpus of documents, most of them longer than a sequence, packed best-fit."""
    folder = tmp_path_factory.mktemp("documents")
    write_corpus(folder / "text", files=12)
    data = DataConfig(
        source=str(folder / "text"), path=str(folder / "corpus"), seq_len=S, shard_tokens=4000,
        packing="best_fit",
    )  # fmt: skip
    return prepare_corpora(data, VOCAB, lambda _: None)


def _shards(corpora: Corpora, split: str) -> list[np.ndarray]:
    """The tokens of each shard of a split, read without the library."""
    (source,) = corpora.sources
    return [
        np.fromfile(Path(source.data.path) / shard.file, source.manifest.dtype)
        for shard in getattr(source.manifest, split)
    ]


@case(
    "marin-community/marin#2700",
    "The training set was cut from a shuffled data set and the validation set from the plain one, "
    "so that some samples were in both.",
    Edit("corpus/prepare/prepare.py", '("train", kept & ~held_out)', '("train", kept)'),
)
def test_no_held_out_document_is_trained_on(corpora):
    """No document that a corpus holds out is among its training documents, and none is lost."""
    tokenizer = load_tokenizer(corpora.data)
    end, found = end_of_document(tokenizer), {}
    for split in ("train", "val"):
        tokens = np.concatenate(_shards(corpora, split))
        pieces = np.split(tokens, np.flatnonzero(tokens == end) + 1)[:-1]
        found[split] = {tokenizer.decode(piece[:-1].tolist()) for piece in pieces}
    files = {path.read_text(errors="replace") for path in Path(corpora.data.source).iterdir()}
    assert found["train"]
    assert found["val"]
    assert len(found["train"] & found["val"]) == 0
    assert found["train"] | found["val"] == files


@case(
    "axolotl-ai-cloud/axolotl#1265",
    "A prepared data set was used again for a model with another tokenizer, which read the tokens "
    "as other words.",
    Edit("corpus/manifest.py", '"tokenizer": data.tokenizer,', '"tokenizer": None,'),
)
def test_tokens_of_another_tokenizer_are_refused(corpora, tmp_path):
    """A spec that names another tokenizer than the one that made a corpus is refused."""
    write_corpus(tmp_path / "text", files=6)
    other = DataConfig(source=str(tmp_path / "text"), path=str(tmp_path / "corpus"), seq_len=S)
    prepare_corpora(other, VOCAB, lambda _: None)
    named = corpora.data.model_copy(update={"tokenizer": str(tmp_path / "corpus/tokenizer.json")})
    with pytest.raises(InputError, match="was prepared with tokenizer None, the spec says"):
        open_corpora(named, VOCAB)


@case(
    "allenai/OLMo-core#303",
    "The fingerprint of a data set left out options that its cached files depend on.",
    Edit("corpus/manifest.py", '"deduplicate": data.deduplicate,', '"deduplicate": False,'),
    Edit("corpus/manifest.py", "data.filter.model_dump(exclude_defaults=True)", "{}"),
)
@pytest.mark.parametrize(
    ("field", "value"),
    [("deduplicate", True), ("filter", {"min_characters": 700}), ("text_field", "body")],
)
def test_a_corpus_of_other_options_is_refused(corpora, field, value):
    """A spec with another option of preparation than a corpus was made with is refused."""
    changed = DataConfig(**{**corpora.data.model_dump(), field: value})
    with pytest.raises(InputError, match=f"was prepared with {field}"):
        open_corpora(changed, VOCAB)


@case(
    "huggingface/trl#4632",
    "Best-fit packing dropped the tokens of a document that are beyond the length of a sequence.",
    Edit(
        "pretrain/data/best_fit.py",
        "counts = np.maximum(1, -(-(sizes - 1) // S))",
        "counts = np.ones_like(sizes)",
    ),
)
def test_packing_keeps_every_token_of_long_documents(corpora):
    """Best-fit packing has each pair of a token and its next token in a document exactly once."""
    end = end_of_document(load_tokenizer(corpora.data))
    sequences = corpora.train_sequences()
    found = [
        (a, b)
        for row in sequences.read(range(len(sequences))).tolist()
        for a, b in pairwise(row)
        if b >= 0 and a != end
    ]
    shards = [tokens.tolist() for tokens in _shards(corpora, "train")]
    assert max(map(len, shards)) > S
    wanted = [(a, b) for tokens in shards for a, b in pairwise(tokens) if a != end]
    assert sorted(found) == sorted(wanted)


@case(
    "modelscope/ms-swift#9902",
    "The loader of streamed and packed data told no epoch to the data set, and every epoch had the "
    "samples in exactly one order.",
    Edit(
        "pretrain/data/order.py",
        "self._encrypt_many(values[left], int(epoch))",
        "self._encrypt_many(values[left], 0)",
    ),
)
def test_packed_sequences_are_shuffled_anew_in_each_epoch(corpora):
    """Two epochs of packed documents have the same sequences in two different orders."""
    sequences = corpora.train_sequences()
    count = len(sequences)
    loader = loader_of(sequences, corpora.order(corpora.blend(), sequences, 3), batch=count)
    epochs = []
    for first in (0, count):
        batches, _ = loader.step(Cursor(first))
        epochs.append([tuple(row.tolist()) for batch in batches for row in batch])
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]
