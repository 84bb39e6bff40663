"""Text to token shards, once.

A prepared corpus is a folder::

    tokenizer.json       byte-level BPE
    train-00000.bin ...  token ids, little-endian uint16 or uint32, documents end to end
    val-00000.bin ...    the held-out documents
    manifest.json        written last

The folder is written under a temporary name and renamed at the end: a folder at ``data.path`` is
never half written.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from tokenizers import Tokenizer

from ckpt.store import new_folder
from pretrain.data.config import DataConfig
from pretrain.data.documents import Document, find_documents, is_held_out
from pretrain.data.manifest import CorpusManifest, Shard, open_corpus
from pretrain.data.tokenizer import (
    end_of_document,
    read_tokenizer,
    tokenizer_fingerprint,
    train_tokenizer,
)
from pretrain.errors import InputError

_BATCH = 512


def prepare_corpus(
    data: DataConfig, vocab_size: int, say: Callable[[str], None] = print
) -> CorpusManifest:
    """Prepare the corpus of ``data``; where ``data.path`` exists, check and use what is there.

    Args:
        data: of the spec.
        vocab_size: of the model.
        say: told of what is done, one line each.

    Raises InputError where the source has fewer than two documents, where ``data.path`` holds
    another corpus or none, or where it cannot be written.
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
    say(f"preparing {data.path}: {len(train)} documents, {len(val)} held out")
    try:
        with new_folder(folder) as partial:
            return _write(partial, data, vocab_size, train, val)
    except OSError as error:
        if (folder / "manifest.json").exists():  # another process has prepared the corpus meanwhile
            return open_corpus(data, vocab_size)
        raise InputError(
            f"data.path ({data.path}) cannot be prepared: {error.strerror}: "
            f"{error.filename or folder}"
        ) from None


def _write(
    folder: Path, data: DataConfig, vocab_size: int, train: list[Document], val: list[Document]
) -> CorpusManifest:
    if data.tokenizer is None:
        tokenizer = train_tokenizer(train, vocab_size, data.tokenizer_bytes, data.end_token)
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
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        fingerprint=digest.hexdigest(),
    )
    (folder / "manifest.json").write_text(json.dumps(manifest.model_dump(), indent=1) + "\n")
    return manifest


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
    """The bytes of all documents, one after the other, under gzip -9 and under xz -9."""
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
