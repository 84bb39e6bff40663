"""The ``[data]`` section of the spec."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

END_OF_DOCUMENT = "<|endoftext|>"


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
