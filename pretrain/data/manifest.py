"""The manifest of a prepared corpus."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from pretrain.data.config import END_OF_DOCUMENT, DataConfig
from pretrain.data.tokenizer import load_tokenizer, tokenizer_fingerprint
from pretrain.errors import InputError


class Shard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    file: str
    tokens: int


class CorpusManifest(BaseModel):
    """``manifest.json`` of a prepared corpus: the settings, the shard files, and sizes in bytes."""

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
    tokenizer_fingerprint: str = ""
    """See :func:`pretrain.data.tokenizer_fingerprint`; corpora of before do not name it."""
    fingerprint: str
    """SHA-256 of the tokenizer and of every token. A run refuses to resume on another corpus."""


def open_corpus(data: DataConfig, vocab_size: int) -> CorpusManifest:
    """The manifest at ``data.path``.

    Raises InputError where there is no manifest, where it is damaged, or where the corpus was
    prepared with other settings than those of ``data``.
    """
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
    tokenizer = load_tokenizer(data)
    if not manifest.tokenizer_fingerprint:
        made = tokenizer_fingerprint(tokenizer)
        manifest = manifest.model_copy(update={"tokenizer_fingerprint": made})
    return manifest
