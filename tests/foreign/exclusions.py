"""The cases of others' suites that cannot pass over Convoy, each with the reason.

A line of an exclusions file is ``CASE | REASON``; ``*`` in a case stands for any characters. An
excluded case is run, and must not pass: an exclusion that is needed no longer is an error. A
reason that begins with ``not run:`` is for a case that would end its process or wait for ever.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

UNRUN = "not run: "


@dataclass(frozen=True)
class Exclusion:
    """One line of an exclusions file."""

    case: str
    reason: str

    @property
    def run(self) -> bool:
        """Whether the case is run."""
        return not self.reason.startswith(UNRUN)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, self.case.split("*"))), re.DOTALL)

    def matches(self, case: str) -> bool:
        """Whether the line is about a case."""
        return self._pattern.fullmatch(case) is not None


def read_exclusions(path: Path) -> list[Exclusion]:
    """The lines of a file; no file is no line. Raises ValueError for a line without a reason."""
    lines = path.read_text().splitlines() if path.exists() else []
    exclusions = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        case, separator, reason = line.partition(" | ")
        reason = reason.strip()
        if not (separator and case.strip() and reason.removeprefix(UNRUN.strip()).strip()):
            raise ValueError(f"{path}:{number} must be CASE | REASON, not {line!r}")
        exclusions.append(Exclusion(case.strip(), reason))
    return exclusions
