"""The check of every byte of a prepared corpus."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pretrain.data.manifest import CorpusManifest, Shard
from pretrain.errors import InputError

_BLOCK = 1 << 20


def verify_corpus(folder: Path, manifest: CorpusManifest) -> int:
    """Read every file of a corpus and compare it with the manifest; returns the bytes read.

    Raises InputError, naming the first file that is missing or differs.
    """
    digest = hashlib.sha256()
    tokenizer = _tokenizer_text(folder, manifest)
    if tokenizer is not None:
        digest.update(tokenizer)
    read = 0
    for shard in (*manifest.train, *manifest.val):
        path = folder / shard.file
        read += _check(path, shard.sha256, digest)
        if shard.ends_sha256:
            read += _check(path.with_suffix(".ends"), shard.ends_sha256)
    # Corpora of version 1 have one hash, of all tokens.
    if manifest.version == 1 and digest.hexdigest() != manifest.fingerprint:
        raise InputError(
            f"data.path ({folder}) has tokens that are not those of its fingerprint; its manifest "
            f"is of version 1 and does not say which file: remove the folder to prepare it anew"
        )
    return read


def _tokenizer_text(folder: Path, manifest: CorpusManifest) -> bytes | None:
    if manifest.version != 1:
        return None
    from tokenizers import Tokenizer

    # As it was when the fingerprint was taken: a tokenizer that was read.
    return Tokenizer.from_file(str(folder / "tokenizer.json")).to_str().encode()


def _check(path: Path, wanted: str, digest: hashlib._Hash | None = None) -> int:
    found, read = hashlib.sha256(), 0
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
                read += len(block)
                if digest is not None:
                    digest.update(block)
    except OSError as error:
        raise InputError(f"corpus file {path} cannot be read: {error.strerror}") from None
    if wanted and found.hexdigest() != wanted:
        raise InputError(
            f"corpus file {path} is damaged: its SHA-256 is {found.hexdigest()[:12]}, its manifest "
            f"says {wanted[:12]}; restore it, or remove the folder to prepare it anew"
        )
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
