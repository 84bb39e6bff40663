"""The ``[data]`` section of the spec."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from pretrain.data.filters import FilterConfig

END_OF_DOCUMENT = "<|endoftext|>"


class DataConfig(BaseModel):
    """The ``[data]`` section: the corpus, its tokenizer and its sequences."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True
    )

    source: str = Field(min_length=1)
    """Where the documents come from: ``stdlib`` (this Python's standard library), a folder, a file
    or a glob. docs/data.md has the formats."""
    path: str = Field(min_length=1)
    """The folder of the prepared corpus, which is made where there is none."""
    seq_len: int = Field(ge=1)
    """Tokens of one sequence."""
    shard_tokens: int = Field(default=1 << 26, ge=2)
    """Tokens of one shard file; no sequence crosses from one shard into the next."""
    tokenizer_bytes: int = Field(default=64 << 20, ge=1)
    """The tokenizer is trained on at most this many bytes of the training text."""
    tokenizer: str | None = None
    """A tokenizer.json to use, byte-level or of SentencePiece with byte fallback; by default a
    byte-level tokenizer is trained."""
    end_token: str = Field(default=END_OF_DOCUMENT, min_length=1)
    """The token that ends a document."""
    document_mask: bool = False
    """Tokens attend only to tokens of their own document; without the mask, to all earlier tokens
    of their sequence. The end token is the last token of its document."""
    text_field: str = Field(default="text", min_length=1)
    """The field of a line of JSON, or the column of a Parquet or Arrow file, that has the text. A
    column of lists of integers has token ids of ``tokenizer``."""
    deduplicate: bool = False
    """Leave out documents whose text is equal to that of an earlier document."""
    filter: FilterConfig = FilterConfig()
    """Which texts are left out."""
