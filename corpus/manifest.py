"""The manifest of a prepared corpus."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from corpus.config import END_OF_DOCUMENT, TOKENIZER_BYTES, DataConfig, is_remote
from corpus.errors import InputError
from corpus.location import read_file
from corpus.tokenizer import load_tokenizer, tokenizer_fingerprint

MANIFEST = "manifest.json"
"""The file of a manifest, written last."""
MANIFEST_VERSION = 2


class _Record(BaseModel):
    """Fields of a manifest."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Shard(_Record):
    """One file of tokens."""

    file: str
    tokens: int
    documents: int | None = None
    """Documents that end in the shard."""
    sha256: str
    """Of the file."""
    ends_sha256: str = ""
    """Of the file of the same name with the suffix ``.ends``: int64, little-endian, the number of
    tokens of the shard up to and with the last token of each of these documents."""

    @property
    def ends_file(self) -> str:
        """The name of that file."""
        return str(Path(self.file).with_suffix(".ends"))


class Skipped(_Record):
    """Files that were not read, for one reason."""

    files: int
    bytes: int
    names: list[str]
    """The first of them."""


class LeftOut(_Record):
    """Documents that were read and left out, for one reason."""

    documents: int
    bytes: int


_FORMER = ("val_gzip_bytes", "val_xz_bytes", "val_compressed_bytes")


class Sealed(_Record):
    """A record that says whether it was changed since it was written."""

    checksum: str = ""
    """SHA-256 of all other fields; empty until it is sealed."""

    def sealed(self) -> Self:
        """The record with its checksum."""
        return self.model_copy(update={"checksum": self._checksum()})

    @property
    def is_sealed(self) -> bool:
        """Whether the checksum is that of the other fields."""
        return self.checksum == self._checksum()

    def _checksum(self) -> str:
        return hashlib.sha256(json.dumps(self._values(), sort_keys=True).encode()).hexdigest()

    def _values(self) -> dict[str, Any]:
        """What the checksum covers."""
        return self.model_dump(exclude={"checksum"})


class CorpusManifest(Sealed):
    """``manifest.json`` of a prepared corpus: the settings, the shard files, and sizes in bytes."""

    version: int
    source: str
    vocab_size: int
    shard_tokens: int
    tokenizer_bytes: int
    tokenizer: str | None = None
    end_token: str = END_OF_DOCUMENT
    text_field: str = "text"
    deduplicate: bool = False
    filter: dict[str, Any] = {}
    """The fields of ``[data.filter]`` that are not at their defaults."""
    chat: dict[str, Any] | None = None
    """``[data.chat]``, where documents are conversations: a token that is no target is stored as
    its bitwise complement, which is negative."""
    hold_out: str = "some"
    """Whether ``some`` documents are held out, or ``all``, as in a validation set."""
    dtype: str
    train: list[Shard]
    val: list[Shard]
    train_documents: int
    val_documents: int
    train_bytes: int
    val_bytes: int
    files: int | None = None
    """Files that were read."""
    skipped: dict[str, Skipped] = {}
    """Files that were not read, by the reason."""
    left_out: dict[str, LeftOut] = {}
    """Documents that the corpus does not have, by the reason."""
    replaced_documents: int = 0
    """Documents in which bytes that are not UTF-8 were replaced by U+FFFD."""
    tokenizer_tokens: int | None = None
    """Tokens that the tokenizer knows, at most ``vocab_size``."""
    tokenizer_fingerprint: str = ""
    """See :func:`corpus.tokenizer.tokenizer_fingerprint`."""
    fingerprint: str
    """The version of the dataset: SHA-256 of the tokenizer and of every token, in order. A run
    refuses to resume on another corpus."""
    former: dict[str, int | None] = Field(default={}, exclude=True)
    """Fields that corpora of before have and nothing reads; their checksum covers them."""

    @model_validator(mode="before")
    @classmethod
    def _set_former_apart(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        former = {name: values[name] for name in _FORMER if name in values}
        kept = {name: value for name, value in values.items() if name not in _FORMER}
        return {**kept, "former": former} if former else kept

    @property
    def train_tokens(self) -> int:
        """Tokens to train on."""
        return sum(shard.tokens for shard in self.train)

    @property
    def val_tokens(self) -> int:
        """Tokens that are held out."""
        return sum(shard.tokens for shard in self.val)

    def _values(self) -> dict[str, Any]:
        return {**super()._values(), **self.former}

    @model_serializer(mode="wrap")
    def _without_chat(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        if self.chat is None:  # corpora of texts keep the checksum that they had
            values.pop("chat", None)
        return values


def read_manifest(folder: Path | str) -> CorpusManifest:
    """The manifest of a folder, or of a place in an object store.

    Raises InputError where there is none, or where it is damaged, changed or of a later version.
    """
    try:
        raw = read_file(f"{folder}/{MANIFEST}")
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        if missing and (is_remote(folder) or not Path(folder).exists()):
            raise InputError(
                f"data.path ({folder}) has no prepared corpus yet: convoy prepare SPEC makes one"
            ) from None
        raise InputError(
            f"data.path ({folder}) must be a prepared corpus or not exist: {MANIFEST}: "
            f"{error.strerror}"
        ) from None
    try:
        values = json.loads(raw)
        version = values.get("version") if isinstance(values, dict) else None
        if isinstance(version, int) and version != MANIFEST_VERSION:
            raise InputError(
                f"data.path ({folder}) has a manifest of version {version}; this version of Convoy "
                f"reads version {MANIFEST_VERSION}: take the Convoy that made it, or another "
                f"data.path"
            )
        manifest = CorpusManifest.model_validate(values)
    except InputError:
        raise
    except (ValidationError, ValueError):
        raise InputError(f"data.path ({folder}) has a damaged manifest; remove it") from None
    if not manifest.is_sealed:
        raise InputError(
            f"data.path ({folder}) has a manifest that was changed after it was written; put it "
            f"back, or remove the folder to prepare it anew"
        )
    return manifest


def open_corpus(data: DataConfig, vocab_size: int, hold_out: str = "some") -> CorpusManifest:
    """The manifest at ``data.path``.

    Raises InputError where there is no manifest, where it is damaged, or where the corpus was
    prepared with other settings than those of ``data``.
    """
    manifest = read_manifest(data.path)
    wanted = {**settings_of(data, vocab_size), "hold_out": hold_out}
    for field, value in wanted.items():
        stored = getattr(manifest, field)
        if stored != value:
            raise InputError(
                f"data.path ({data.path}) was prepared with {field} {stored}, the spec says "
                f"{value}; choose another data.path or remove that one"
            )
    tokenizer = load_tokenizer(data)
    made = tokenizer_fingerprint(tokenizer)
    if manifest.tokenizer_fingerprint != made:
        raise InputError(
            f"data.path ({data.path}) has a tokenizer.json that is not the one that made its "
            f"tokens; put it back, or remove the folder to prepare it anew"
        )
    return manifest


def record_manifest(run: Path, manifest: CorpusManifest) -> None:
    """Keep a manifest with a run, under its fingerprint: what the run was trained on stays known
    where the corpus is removed or prepared anew.

    A file that a cut of power has torn is written again.
    """
    path = run / "data" / f"{manifest.fingerprint}.json"
    if recorded_manifest(run, manifest.fingerprint) is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps({**manifest.model_dump(), **manifest.former}, indent=1) + "\n")
        draft.replace(path)


def recorded_manifest(run: Path, fingerprint: str) -> CorpusManifest | None:
    """A manifest that a run has kept; None where it has none that can be read."""
    try:
        raw = (run / "data" / f"{fingerprint}.json").read_bytes()
        return CorpusManifest.model_validate_json(raw)
    except (OSError, ValidationError):
        return None


def settings_of(data: DataConfig, vocab_size: int) -> dict[str, Any]:
    """The fields of a manifest that say how a corpus was made."""
    return {
        "source": data.source,
        "vocab_size": vocab_size,
        "shard_tokens": data.shard_tokens,
        "tokenizer_bytes": TOKENIZER_BYTES,
        "tokenizer": data.tokenizer,
        "end_token": data.end_token,
        "text_field": data.text_field,
        "deduplicate": data.deduplicate,
        "filter": data.filter.model_dump(exclude_defaults=True),
        "chat": None if data.chat is None else data.chat.model_dump(),
    }
