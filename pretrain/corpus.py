"""From a folder of text to shards of tokens, once.

A prepared corpus is a folder::

    tokenizer.json       byte-level BPE
    train-00000.bin ...  token ids, little-endian uint16 or uint32, documents end to end
    val-00000.bin ...    the held-out documents
    manifest.json        written last

It is made under another name and renamed, so a folder with the right name is whole.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pretrain.errors import InputError
from pretrain.sources import Document, find_documents, is_held_out

END_OF_DOCUMENT = "<|endoftext|>"
_BATCH = 512


class DataConfig(BaseModel):
    """The ``[data]`` section."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    source: str = Field(min_length=1)
    """``stdlib`` (this Python's standard library), a folder, a file or a glob."""
    path: str = Field(min_length=1)
    """Where the prepared corpus is kept; made when it is not there."""
    seq_len: int = Field(ge=1)
    """Tokens of one sequence."""
    shard_tokens: int = Field(default=1 << 26, ge=2)
    """Tokens of one shard file; no sequence crosses from one into the next."""
    tokenizer_bytes: int = Field(default=64 << 20, ge=1)
    """The tokenizer is trained on at most this much of the training text."""
    tokenizer: str | None = None
    """A tokenizer.json to take instead of training one; byte-level, as most are."""
    end_token: str = Field(default=END_OF_DOCUMENT, min_length=1)
    """The token that ends a document."""
    document_mask: bool = False
    """Tokens attend to those of their own document alone, and not to all before them in their
    sequence; the end token is the last of its document."""


class Shard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: str
    tokens: int


class CorpusManifest(BaseModel):
    """What was prepared, and the size of the held-out text under two compressors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    vocab_size: int
    shard_tokens: int
    tokenizer_bytes: int
    tokenizer: str | None = None
    end_token: str = END_OF_DOCUMENT
    dtype: str
    train: list[Shard]
    val: list[Shard]
    train_documents: int
    val_documents: int
    train_bytes: int
    val_bytes: int
    val_gzip_bytes: int
    val_xz_bytes: int
    fingerprint: str
    """SHA-256 of the tokenizer and every token; runs on unlike corpora are never mixed."""


def prepare_corpus(
    data: DataConfig, vocab_size: int, say: Callable[[str], None] = print
) -> CorpusManifest:
    """Make the corpus of ``data``, or check that the one at ``data.path`` is it.

    Raises InputError for a source without enough text, for a path that holds something else and
    for one that cannot be written.
    """
    folder = Path(data.path)
    if folder.exists():
        manifest = open_corpus(data, vocab_size)
        say(f"using the corpus at {data.path}; data.source is not read again")
        return manifest
    documents = find_documents(data.source)
    train = [d for d in documents if not is_held_out(d)]
    val = [d for d in documents if is_held_out(d)]
    if not val and len(train) > 1:
        val = [train.pop(min(range(len(train)), key=lambda i: train[i].hash))]
    if not train or not val:
        raise InputError(
            f"data.source ({data.source}) must have at least 2 documents with text, one to train "
            f"on and one to hold out; it has {len(documents)}"
        )
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    say(f"preparing {data.path}: {len(train)} documents, {len(val)} held out")
    try:
        partial.mkdir(parents=True)
        manifest = _write(partial, data, vocab_size, train, val)
        _make_durable(partial)
        partial.replace(folder)
    except OSError as error:
        if (folder / "manifest.json").exists():  # someone else was faster
            return open_corpus(data, vocab_size)
        raise InputError(
            f"data.path ({data.path}) cannot be prepared: {error.strerror}: "
            f"{error.filename or partial}"
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _make_durable(folder: Path) -> None:
    for path in (*folder.iterdir(), folder, folder.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def open_corpus(data: DataConfig, vocab_size: int) -> CorpusManifest:
    """The manifest at ``data.path``. Raises InputError where it is none, or of another corpus."""
    path = Path(data.path) / "manifest.json"
    try:
        manifest = CorpusManifest.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"data.path ({data.path}) must be a prepared corpus or not exist: {path.name}: "
            f"{error.strerror}"
        ) from None
    except ValidationError:
        raise InputError(f"data.path ({data.path}) has a damaged manifest; remove it") from None
    wanted = {
        "source": data.source,
        "vocab_size": vocab_size,
        "shard_tokens": data.shard_tokens,
        "tokenizer_bytes": data.tokenizer_bytes,
        "tokenizer": data.tokenizer,
        "end_token": data.end_token,
    }
    for field, value in wanted.items():
        found = getattr(manifest, field)
        if found != value:
            raise InputError(
                f"data.path ({data.path}) was prepared with {field} {found}, the spec says "
                f"{value}; choose another data.path or remove that one"
            )
    load_tokenizer(data)
    return manifest


def load_tokenizer(data: DataConfig) -> Tokenizer:
    """The prepared corpus's tokenizer; the end of a document spelt out in a text is only text."""
    path = Path(data.path) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"corpus file {path} cannot be read: {error}") from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def read_tokenizer(path: Path, vocab_size: int, end_token: str) -> Tokenizer:
    """A tokenizer that was made elsewhere, ready for whole documents.

    Raises InputError where it cannot be read, is not byte-level, has ids beyond ``vocab_size``, or
    lacks ``end_token``.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"data.tokenizer ({path}) cannot be read: {error}") from None
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        raise InputError(
            f"data.tokenizer ({path}) must be byte-level: bytes of text are counted from tokens"
        )
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
    return tokenizer


def end_of_document(tokenizer: Tokenizer, end_token: str = END_OF_DOCUMENT) -> int:
    """The id of the token that ends a document."""
    token = tokenizer.token_to_id(end_token)
    assert token is not None, "seen to when the corpus was prepared"
    return token


def bytes_per_token(
    tokenizer: Tokenizer, vocab_size: int, end_token: str = END_OF_DOCUMENT
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[V] int64: how many bytes of text each token stands for; the end of a document none."""
    # A byte-level token is spelt with one character for each byte; an added one as it is.
    tokens = [tokenizer.id_to_token(i) or "" for i in range(vocab_size)]
    sizes = np.array([len(token) for token in tokens], dtype=np.int64)
    for i, token in tokenizer.get_added_tokens_decoder().items():
        sizes[i] = len(token.content.encode())
    sizes[end_of_document(tokenizer, end_token)] = 0
    return sizes


def _write(
    folder: Path, data: DataConfig, vocab_size: int, train: list[Document], val: list[Document]
) -> CorpusManifest:
    if data.tokenizer is None:
        tokenizer = _train_tokenizer(train, vocab_size, data.tokenizer_bytes, data.end_token)
    else:
        tokenizer = read_tokenizer(Path(data.tokenizer), vocab_size, data.end_token)
    tokenizer.save(str(folder / "tokenizer.json"))
    digest = hashlib.sha256(tokenizer.to_str().encode())
    dtype = "uint16" if vocab_size <= 1 << 16 else "uint32"
    shards: dict[str, list[Shard]] = {}
    sizes: dict[str, int] = {}
    for split, documents in (("train", train), ("val", val)):
        shards[split], sizes[split] = _write_split(
            folder, split, documents, tokenizer, dtype, data, digest.update
        )
    gzip_bytes, xz_bytes = _compressed_sizes(val)
    manifest = CorpusManifest(
        source=data.source,
        vocab_size=vocab_size,
        shard_tokens=data.shard_tokens,
        tokenizer_bytes=data.tokenizer_bytes,
        tokenizer=data.tokenizer,
        end_token=data.end_token,
        dtype=dtype,
        train=shards["train"],
        val=shards["val"],
        train_documents=len(train),
        val_documents=len(val),
        train_bytes=sizes["train"],
        val_bytes=sizes["val"],
        val_gzip_bytes=gzip_bytes,
        val_xz_bytes=xz_bytes,
        fingerprint=digest.hexdigest(),
    )
    (folder / "manifest.json").write_text(json.dumps(manifest.model_dump(), indent=1) + "\n")
    return manifest


def _train_tokenizer(
    documents: list[Document], vocab_size: int, limit: int, end_token: str
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[end_token],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )

    def some() -> Iterator[str]:
        left = limit
        # By hash, so that a limit takes from everywhere and not from the first folder.
        for document in sorted(documents, key=lambda d: d.hash):
            raw = document.read().encode()[:left]
            yield raw.decode(errors="ignore")
            left -= len(raw)
            if left <= 0:
                return

    tokenizer.train_from_iterator(some(), trainer)
    tokenizer.encode_special_tokens = True
    return tokenizer


def _write_split(
    folder: Path,
    split: str,
    documents: list[Document],
    tokenizer: Tokenizer,
    dtype: str,
    data: DataConfig,
    digest: Callable[[bytes], None],
) -> tuple[list[Shard], int]:
    end, shard_tokens = end_of_document(tokenizer, data.end_token), data.shard_tokens
    shards: list[Shard] = []
    waiting = np.empty(0, dtype)
    size = 0

    def flush(tokens: np.ndarray) -> None:
        name = f"{split}-{len(shards):05d}.bin"
        raw = np.ascontiguousarray(tokens).tobytes()
        (folder / name).write_bytes(raw)
        digest(raw)
        shards.append(Shard(file=name, tokens=len(tokens)))

    for batch in _batches(documents):
        texts = [document.read() for document in batch]
        size += sum(len(text.encode()) for text in texts)
        encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
        ids = [np.array([*encoding.ids, end], dtype) for encoding in encoded]
        waiting = np.concatenate([waiting, *ids])
        while len(waiting) >= shard_tokens:
            flush(waiting[:shard_tokens])
            waiting = waiting[shard_tokens:]
    if len(waiting):
        flush(waiting)
    return shards, size


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


class _Counter(io.RawIOBase):
    def __init__(self) -> None:
        self.count = 0

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.count += len(data)
        return len(data)


def _compressed_sizes(documents: list[Document]) -> tuple[int, int]:
    """The documents end to end under gzip -9 and xz -9, in bytes."""
    gzipped, xzipped = _Counter(), _Counter()
    with (
        gzip.GzipFile(fileobj=gzipped, mode="wb", compresslevel=9, mtime=0) as g,
        lzma.LZMAFile(cast(BinaryIO, xzipped), mode="wb", preset=9) as x,
    ):
        for document in documents:
            data = document.read().encode()
            g.write(data)
            x.write(data)
    return gzipped.count, xzipped.count
