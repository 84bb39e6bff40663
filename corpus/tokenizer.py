"""Byte-level BPE tokenizers: training, loading and checks."""

from __future__ import annotations

import hashlib
import heapq
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus.config import END_OF_DOCUMENT, TOKENIZER_BYTES, DataConfig, is_remote
from corpus.documents import Document, Unit, is_held_out, read_unit
from corpus.errors import InputError
from corpus.location import read_file


def load_tokenizer(data: DataConfig) -> Tokenizer:
    """The tokenizer of the prepared corpus.

    A text that spells out the end token is encoded as ordinary text, not as the end token.

    Raises InputError where the file cannot be read.
    """
    return tokenizer_at(data.tokenizer_file)


def tokenizer_at(path: Path | str) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json``, by its path or URL; as :func:`load_tokenizer`."""
    try:
        text = _remote(str(path)) if is_remote(path) else _local(str(path))
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{path} cannot be read: {error}; a tokenizer.json is needed") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def _local(path: str) -> str:
    return read_file(path).decode()


_remote = lru_cache(maxsize=8)(_local)
"""A run asks an object store once, and not at each evaluation."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A token of SentencePiece that stands for one byte (byte fallback)."""
_SPACE = "\u2581"
"""SentencePiece's letter for a space."""
_TRIED = ("a", "The quick  brown\n\nfox\tdéjà vu 漢字 🙂 <s>", "def f(x):\n    return x + 1.50\n")
"""Texts of which a tokenizer's tokens must give the bytes."""
_LONG_RUN = re.compile(r"(?<!\S)\S{4096,}|(?<!\s)\s{4096,}")
_RUN = 4096
"""The time to train on a word grows with the square of its length: a longer one is cut."""


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256 of all that a tokenizer does, in hex; equal for a tokenizer that was saved and read
    again."""
    again = Tokenizer.from_str(tokenizer.to_str())
    return hashlib.sha256(again.to_str().encode()).hexdigest()


def read_tokenizer(path: Path | str, vocab_size: int, end_token: str) -> Tokenizer:
    """A tokenizer.json of another project, without truncation and padding.

    Raises InputError where the file cannot be read, or where the tokenizer has an id of
    ``vocab_size`` or above, or lacks ``end_token``, or is neither byte-level nor a SentencePiece
    tokenizer that keeps every byte of a text.
    """
    try:
        tokenizer = Tokenizer.from_str(read_file(path).decode())
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"data.tokenizer ({path}) cannot be read: {error}") from None
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values())
    if largest >= vocab_size:
        raise InputError(
            f"model.vocab_size ({vocab_size}) must be above the largest id ({largest}) of "
            f"data.tokenizer ({path})"
        )
    if tokenizer.token_to_id(end_token) is None:
        raise InputError(f"data.end_token ({end_token}) must be a token of data.tokenizer ({path})")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    if not _keeps_bytes(tokenizer, vocab_size, end_token):
        raise InputError(
            f"data.tokenizer ({path}) must be byte-level, or SentencePiece with byte fallback and "
            f"no change of the text: bytes of text are counted from tokens"
        )
    return tokenizer


def _keeps_bytes(tokenizer: Tokenizer, vocab_size: int, end_token: str) -> bool:
    """Whether :func:`bytes_per_token` tells the bytes of texts."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        return True
    sizes = bytes_per_token(tokenizer, vocab_size, end_token)
    end = sizes[end_of_document(tokenizer, end_token)]
    return all(
        sizes[tokenizer.encode(text, add_special_tokens=False).ids].sum() + end
        == len(text.encode())
        for text in _TRIED
    )


def end_of_document(tokenizer: Tokenizer, end_token: str = END_OF_DOCUMENT) -> int:
    """The id of the token that ends a document."""
    token = tokenizer.token_to_id(end_token)
    assert token is not None, "seen to when the corpus was prepared"
    return token


def bytes_per_token(
    tokenizer: Tokenizer, vocab_size: int, end_token: str = END_OF_DOCUMENT
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The bytes of text that each token stands for, int64 [V].

    The end token stands for 0 bytes, or for -1 where the tokenizer puts a space in front of every
    document, as SentencePiece does: the sum over a document is then that of its text.
    """
    tokens = [tokenizer.id_to_token(i) or "" for i in range(vocab_size)]
    byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
    sizes = np.array([_text_bytes(token, byte_level) for token in tokens], dtype=np.int64)
    # An added token is its own text.
    for i, token in tokenizer.get_added_tokens_decoder().items():
        sizes[i] = len(token.content.encode())
    end = end_of_document(tokenizer, end_token)
    sizes[end] = 0
    if not byte_level:
        of_one = sizes[tokenizer.encode("a", add_special_tokens=False).ids].sum()
        sizes[end] = -1 if of_one == 2 else 0
    return sizes


def _text_bytes(token: str, byte_level: bool) -> int:
    if byte_level:  # one character for each byte
        return len(token)
    return 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())


def tokenizer_of_units(units: Sequence[Unit], data: DataConfig, vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer, trained on at most :data:`TOKENIZER_BYTES` of the units' texts.

    Documents are taken in the order of their hashes: the sample is then of all folders. Held-out
    documents are left out; where there are none, the first by its hash is, which will be held out.

    Raises InputError where a unit cannot be read, or has tokens and no texts.
    """

    def documents() -> Iterator[Document]:
        for unit in units:
            for document in read_unit(unit, data.text_field, data.chat):
                if document.ids is not None:
                    raise InputError(
                        f"data.tokenizer must name the tokenizer.json of the tokens in "
                        f"{unit.files[0].path}"
                    )
                if not document.is_empty and not data.filter.reason(document.text):
                    yield document

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[data.end_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents(), TOKENIZER_BYTES), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _sample(documents: Iterable[Document], limit: int) -> Iterator[str]:
    """The texts with the smallest hashes, ``limit`` bytes together, in one pass."""
    heap: list[tuple[int, int, bytes]] = []  # the largest hash first
    size = number = 0
    held_out, first = False, (1 << 64, 0)  # hash and bytes of the document with the smallest hash
    for document in documents:
        if is_held_out(document):
            held_out = True
            continue
        raw = document.text.encode()
        first = min(first, (document.hash, len(raw)))
        heapq.heappush(heap, (-document.hash, number, raw))
        size, number = size + len(raw), number + 1
        # The first may have to be held out: the others must do without it.
        while size - len(heap[0][2]) - first[1] >= limit:
            size -= len(heapq.heappop(heap)[2])
    chosen = sorted(heap, key=lambda entry: -entry[0])
    left = limit
    for _, _, raw in chosen if held_out else chosen[1:]:
        raw = raw[:left]
        yield from _without_long_runs(raw.decode(errors="ignore"))
        left -= len(raw)
        if left <= 0:
            return


def _without_long_runs(text: str) -> Iterator[str]:
    """A text in pieces, cut only where a run without or of white space is very long."""
    start = 0
    for run in _LONG_RUN.finditer(text):
        for stop in range(run.start() + _RUN, run.end(), _RUN):
            yield text[start:stop]
            start = stop
    yield text[start:]
