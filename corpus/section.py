"""What the sections about a corpus share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of settings: frozen, without unknown fields, and without NaN and infinities."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    on_resume: ClassVar[Mapping[str, str]] = {"*": "free"}
    """Whether a resume of a run may change a field, see :class:`pretrain.section.OnResume`."""
