"""The ``[data.filter]`` table: documents that are left out, each rule with a name for its count."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class FilterConfig(BaseModel):
    """The ``[data.filter]`` section: which texts are left out of a corpus; all are kept by
    default. The rules are those of Rae et al. (arXiv 2112.11446, appendix A.1.1), with thresholds
    by choice."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    min_characters: int = Field(default=0, ge=0)
    """Shorter texts are left out."""
    max_characters: int | None = Field(default=None, ge=1)
    """Longer texts are left out."""
    min_letter_share: float = Field(default=0.0, ge=0, le=1)
    """Texts with a smaller share of letters among their characters, spaces not counted, are left
    out."""
    max_repeated_line_share: float = Field(default=1.0, ge=0, le=1)
    """Texts in which a larger share of the lines repeats an earlier line are left out."""

    def reason(self, text: str) -> str:
        """Why a text is left out; empty where it is kept."""
        if len(text) < self.min_characters:
            return f"fewer than {self.min_characters} characters"
        if self.max_characters is not None and len(text) > self.max_characters:
            return f"more than {self.max_characters} characters"
        if self.min_letter_share > 0:
            letters = sum(map(str.isalpha, text))
            spaces = sum(map(str.isspace, text))
            if letters < self.min_letter_share * max(1, len(text) - spaces):
                return f"a share of letters below {self.min_letter_share:g}"
        if self.max_repeated_line_share < 1:
            lines = [line for line in text.splitlines() if line.strip()]
            if len(lines) - len(set(lines)) > self.max_repeated_line_share * len(lines):
                return f"a share of repeated lines above {self.max_repeated_line_share:g}"
        return ""
