"""What every section of the spec shares, and what may change in it at a resume."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class OnResume(StrEnum):
    """Whether a resume may change a field: of a class by its ``on_resume``, of one field by
    ``Annotated[..., OnResume.FIXED]``, which goes before that of the class.

    Sections outside of ``pretrain/`` say it in a class variable ``on_resume``, with these values by
    field, and with ``*`` for the other fields.
    """

    FREE = "free"
    """The run goes on with the new value."""
    FIXED = "fixed"
    """Another value would make another run: the resume is refused."""
    FIXED_IF_EXACT = "fixed if exact"
    """As FIXED with ``train.exact``, where bits depend on the value; else as FREE."""


def check_order(table: str, starts: Iterable[int], after: int = 0, what: str = "") -> None:
    """The rule of stages: each begins with more tokens than the one before.

    Args:
        table: the path of the stages.
        starts: their ``from_tokens``.
        after: what the first must be above.
        what: what that is, for people.

    Raises ValueError, one line.
    """
    for start in starts:
        if start <= after:
            raise ValueError(f"{table}.from_tokens ({start}) must be above {what} ({after})")
        after, what = start, "that of the stage before"


class Section(BaseModel):
    """A table of the spec: frozen, without unknown fields, and without NaN and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    on_resume: ClassVar[OnResume]
    """Of the fields that do not say it themselves."""
