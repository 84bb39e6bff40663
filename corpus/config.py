"""The ``[data]`` section of the spec."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

END_OF_DOCUMENT = "<|endoftext|>"
MOST_SAMPLES = 100_000
"""The longest period of a blend."""
TOKENIZER_BYTES = 64 << 20
"""A tokenizer is trained on at most this many bytes of the training text."""


def is_remote(path: str | Path) -> bool:
    """Whether a path is the URL of an object store."""
    return "://" in str(path)


def whole_weights(field: str, weights: Mapping[str, float]) -> dict[str, int]:
    """The smallest whole numbers in the proportions of ``weights``.

    Each period of a blend has as many samples as these numbers add up to. A decimal number means
    what it says: 0.1 and 0.2 are 1 and 2.

    Raises ValueError, naming ``field``, where a weight is not above 0, or where the numbers add up
    to more than :data:`MOST_SAMPLES`.
    """
    wrong = next((n for n, w in weights.items() if not (math.isfinite(w) and w > 0)), None)
    if wrong is not None:
        raise ValueError(f"{field}: the weight of {wrong} ({weights[wrong]}) must be above 0")
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    common = math.lcm(*(weight.denominator for weight in exact.values()))
    scaled = {name: int(weight * common) for name, weight in exact.items()}
    divisor = math.gcd(*scaled.values())
    numbers = {name: number // divisor for name, number in scaled.items()}
    if sum(numbers.values()) > MOST_SAMPLES:
        shown = ", ".join(f"{name}={weight}" for name, weight in weights.items())
        raise ValueError(
            f"{field}: the weights ({shown}) must add up to at most {MOST_SAMPLES} as whole "
            f"numbers without a common divisor ({sum(numbers.values())}); round them to 4 digits"
        )
    return numbers


class Section(BaseModel):
    """A table of settings: frozen, without unknown fields, and without NaN and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    on_resume: ClassVar[Mapping[str, str]] = {"*": "free"}
    """Whether a resume of a run may change a field, see :class:`pretrain.section.OnResume`."""


class SourceConfig(Section):
    """The ``[data.sources.NAME]`` section: one of several sources that a run blends. A run with one
    source needs no such table; it has ``data.source`` and ``data.path``."""

    source: str = Field(min_length=1)
    """Where the documents come from, as ``data.source``."""
    path: str = Field(min_length=1)
    """The folder of the prepared corpus."""
    weight: float = Field(default=1.0, gt=0)
    """The share of the samples that come from this source, relative to the other weights. The
    proportions are exact: each period of samples has each source as often as its weight says."""
    text_field: str | None = None
    """As ``data.text_field``, which holds where this is left out."""


class ValidationConfig(Section):
    """The ``[data.validation.NAME]`` section: documents that are scored by themselves at every
    evaluation, besides those that each source holds out."""

    source: str = Field(min_length=1)
    """Where the documents come from, as ``data.source``; all of them are scored."""
    path: str = Field(min_length=1)
    """The folder of the prepared documents."""
    text_field: str | None = None
    """As ``data.text_field``, which holds where this is left out."""


class StageConfig(Section):
    """The ``[[data.stages]]`` tables: other weights from some tokens on, as in a curriculum."""

    from_tokens: int = Field(ge=1)
    """The stage begins with the first sequence after this many target tokens of the run."""
    weights: dict[str, float]
    """The weight of each source by name; sources that are not named are not drawn in the stage."""


class FilterConfig(Section):
    """The ``[data.filter]`` section: which texts are left out of a corpus; all are kept by
    default."""

    min_characters: int = Field(default=0, ge=0)
    """Shorter texts are left out."""

    def reason(self, text: str) -> str:
        """Why a text is left out; empty where it is kept."""
        if len(text) < self.min_characters:
            return f"fewer than {self.min_characters} characters"
        return ""


class RoleConfig(Section):
    """The ``[data.chat.roles.NAME]`` section: the text around a message of one role."""

    before: str = ""
    """What comes before the content; the spelling of a special token is that token."""
    after: str = ""
    """What comes after the content, likewise."""


def chatml_roles() -> dict[str, RoleConfig]:
    """The roles of ChatML, as Qwen's and many other models have them."""
    roles = ("system", "user", "assistant", "tool")
    return {
        role: RoleConfig(before=f"<|im_start|>{role}\n", after="<|im_end|>\n") for role in roles
    }


class ChatConfig(Section):
    """The ``[data.chat]`` section: documents are conversations, and their answers are the targets.

    A document is then a line of JSON whose field ``data.text_field`` is a list of messages, each
    ``{"role": ..., "content": ...}``. An empty table is ChatML.
    """

    begin: str = ""
    """What comes before the first message."""
    roles: dict[str, RoleConfig] = Field(default_factory=chatml_roles, min_length=1)
    """The roles that messages may have."""
    answers: list[str] = Field(default=["assistant"], min_length=1)
    """The roles whose contents are targets, with what comes after them. Messages after the last of
    these are left out, and so are conversations without any."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        strange = next((role for role in self.answers if role not in self.roles), None)
        if strange is not None:
            raise ValueError(
                f"data.chat.answers ({strange}) must be a role of [data.chat.roles]; there are "
                f"{', '.join(self.roles)}"
            )
        return self


class DataConfig(Section):
    """The ``[data]`` section: the corpus, its tokenizer and its sequences."""

    on_resume: ClassVar[Mapping[str, str]] = {
        "seq_len": "fixed", "shard_tokens": "fixed", "document_mask": "fixed",
        "packing": "fixed", "mask_boundary_labels": "fixed", "*": "free",
    }  # fmt: skip

    source: str = ""
    """Where the documents come from: ``stdlib`` (this Python's standard library), a folder, a file,
    a glob, or a prefix of an object store. docs/data.md has the formats."""
    path: str = ""
    """The folder of the prepared corpus, or its place in an object store (``s3://BUCKET/PREFIX``,
    ``gs://``, ``az://``); it is made where there is none."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Several sources in the place of ``source`` and ``path``."""
    stages: list[StageConfig] = Field(default_factory=list)
    """Changes of the weights of the sources."""
    validation: dict[str, ValidationConfig] = Field(default_factory=dict)
    """More documents to score."""
    seq_len: int = Field(ge=1)
    """Tokens of one sequence."""
    cache_dir: str = ""
    """A folder on each node's own disk for the shards of corpora in an object store, which all
    ranks and runs of the node share."""
    cache_gib: float = Field(default=256.0, gt=0)
    """The most that ``cache_dir`` holds; shards that were not read for the longest time go first.
    It must hold at least two shards for each rank of the node."""
    shard_tokens: int = Field(default=1 << 26, ge=2)
    """Tokens of one shard file; no sequence crosses from one shard into the next."""
    tokenizer: str | None = None
    """A tokenizer.json to use, byte-level or of SentencePiece with byte fallback; by default a
    byte-level tokenizer is trained, on the first of several sources."""
    end_token: str = Field(default=END_OF_DOCUMENT, min_length=1)
    """The token that ends a document."""
    document_mask: bool = False
    """Tokens attend only to tokens of their own document; without the mask, to all earlier tokens
    of their sequence. The end token is the last token of its document."""
    packing: Literal["concat", "best_fit"] = "concat"
    """How documents become sequences: one after another, or each cut as little as can be, with
    padding; docs/data.md has more."""
    mask_boundary_labels: bool = False
    """The first token of a document is no target of the document before it in its sequence."""
    text_field: str = Field(default="text", min_length=1)
    """The field of a line of JSON, or the column of a Parquet or Arrow file, that has the text. A
    column of lists of integers has token ids of ``tokenizer``. With ``[data.chat]``, the field of a
    line of JSON that has the messages."""
    chat: ChatConfig | None = None
    """Documents are conversations; without this table they are texts."""
    deduplicate: bool = False
    """Leave out documents whose text is equal to that of an earlier document of the source."""
    filter: FilterConfig = FilterConfig()
    """Which texts are left out."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.source) != bool(self.path) or bool(self.source) == bool(self.sources):
            raise ValueError(
                "data.source and data.path must both be given, or tables [data.sources.NAME] in "
                "their place"
            )
        if self.sources:
            whole_weights("data.sources", {n: s.weight for n, s in self.sources.items()})
        start = 0
        for stage in self.stages:
            strange = sorted(set(stage.weights) - set(self.sources))
            if strange or not stage.weights:
                known = ", ".join(self.sources) or "none: the run has one source"
                raise ValueError(
                    f"data.stages.weights ({', '.join(strange) or 'none'}) must name sources of "
                    f"[data.sources]; there are {known}"
                )
            if stage.from_tokens <= start:
                raise ValueError(
                    f"data.stages.from_tokens ({stage.from_tokens}) must be above that of the "
                    f"stage before ({start})"
                )
            whole_weights("data.stages.weights", stage.weights)
            start = stage.from_tokens
        self._check_chat()
        paths = [s.path for s in self.sources.values()]
        paths += [s.path for s in self.validation.values()]
        remote = next((path for path in [*paths, self.path] if is_remote(path)), None)
        if remote is not None and (not self.cache_dir or is_remote(self.cache_dir)):
            raise ValueError(
                f"data.cache_dir ({self.cache_dir}) must name a folder on each node's own disk, "
                f"where the shards of {remote} are kept"
            )
        twice = next((path for path in paths if [*paths, self.path].count(path) > 1), None)
        if twice is not None:
            raise ValueError(f"data: the path {twice} must be of one source only")
        return self

    def _check_chat(self) -> None:
        if self.chat is None:
            return
        if self.packing != "best_fit" or not self.document_mask:
            raise ValueError(
                f"data.packing ({self.packing}) must be best_fit and data.document_mask "
                f"({str(self.document_mask).lower()}) must be true with [data.chat]: a "
                f"conversation is then in one sequence, and sees no other one"
            )
        texts = {"begin": self.chat.begin}
        for name, role in self.chat.roles.items():
            texts |= {f"roles.{name}.before": role.before, f"roles.{name}.after": role.after}
        for name, text in texts.items():
            if self.end_token in text:
                raise ValueError(
                    f"data.chat.{name} must not have data.end_token ({self.end_token}): the token "
                    f"ends a document, and comes after the last answer by itself"
                )

    @property
    def has_masked_targets(self) -> bool:
        """Whether some tokens of training sequences are no targets."""
        return self.packing == "best_fit" or self.mask_boundary_labels

    @property
    def each_source(self) -> dict[str, DataConfig]:
        """The sources by name, each as the section of a run with that source alone. The first
        one's tokenizer is everybody's."""
        if not self.sources:
            return {"corpus": self.alone()}
        by_name: dict[str, DataConfig] = {}
        tokenizer = self.tokenizer
        for name, source in self.sources.items():
            by_name[name] = self._of(source, tokenizer)
            tokenizer = tokenizer or by_name[name].tokenizer_file
        return by_name

    @property
    def each_validation(self) -> dict[str, DataConfig]:
        """The further sets of validation documents, likewise."""
        tokenizer = self.tokenizer or self.first.tokenizer_file
        return {name: self._of(source, tokenizer) for name, source in self.validation.items()}

    @property
    def first(self) -> DataConfig:
        """The section of the first source alone; its folder has the tokenizer."""
        return next(iter(self.each_source.values()))

    @property
    def tokenizer_file(self) -> str:
        """The tokenizer of the prepared corpus."""
        return f"{self.first.path if self.sources else self.path}/tokenizer.json"

    def alone(self) -> DataConfig:
        """Without what concerns several sources."""
        return self.model_copy(update={"sources": {}, "stages": [], "validation": {}})

    def _of(self, table: SourceConfig | ValidationConfig, tokenizer: str | None) -> DataConfig:
        changes = {
            "source": table.source,
            "path": table.path,
            "tokenizer": tokenizer,
            "text_field": table.text_field or self.text_field,
        }
        return self.alone().model_copy(update=changes)
