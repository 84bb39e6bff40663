"""The check of every byte of a prepared corpus."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ckpt.store import Store
from corpus.location import blocks_of, damaged, store_at
from corpus.manifest import CorpusManifest, Shard
from pretrain.data.best_fit import PACKING_FOLDER, Packing, read_packing_at
from pretrain.errors import InputError


def verify_corpus(folder: Path | str, manifest: CorpusManifest) -> int:
    """Read every file of a corpus, and of its best-fit packings, and compare it with its hash.

    Returns the bytes read. Raises InputError, naming the first file that is missing or differs.
    """
    read, store = 0, store_at(folder)
    for shard in (*manifest.train, *manifest.val):
        read += _check(store, shard.file, shard.sha256)
        read += _check(store, shard.ends_file, shard.ends_sha256)
    for name, packing in packings_of(folder, manifest).items():
        for packed in packing.shards:
            read += _check(store, f"{name}/{packed.file}", packed.sha256)
    return read


def packings_of(folder: Path | str, manifest: CorpusManifest) -> dict[str, Packing]:
    """The best-fit packings of a corpus, by the names of their folders.

    Raises InputError where one is damaged or of another corpus.
    """
    names = [name for name in store_at(folder).names("") if PACKING_FOLDER.fullmatch(name)]
    return {name: read_packing_at(f"{folder}/{name}", manifest) for name in names}


def _check(store: Store, file: str, wanted: str) -> int:
    found, read, where = hashlib.sha256(), 0, store.where(file)
    try:
        for block in blocks_of(store, file):
            found.update(block)
            read += len(block)
    except OSError as error:
        raise InputError(f"corpus file {where} cannot be read: {error.strerror}") from None
    if found.hexdigest() != wanted:
        raise InputError(damaged(where, found.hexdigest(), wanted))
    return read


def changed_shard(before: CorpusManifest, now: CorpusManifest) -> str:
    """The first shard in which two corpora differ, for people."""
    for split in ("train", "val"):
        old: list[Shard] = getattr(before, split)
        new: list[Shard] = getattr(now, split)
        for a, b in zip(old, new, strict=False):
            if (a.tokens, a.sha256) != (b.tokens, b.sha256):
                return f"{b.file} differs"
        if len(old) != len(new):
            return f"it has {len(new)} {split} shards and had {len(old)}"
    return "its tokenizer differs"
