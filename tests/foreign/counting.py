"""What a run of another project's suite says: how many cases passed over Convoy, and which not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.foreign.exclusions import Exclusion
from tests.foreign.touching import CALLED


@dataclass
class Tally:
    """The cases of a suite. Only ``failed`` and ``stale`` make a run fail."""

    passed: list[str] = field(default_factory=list)
    """They passed, and Convoy had a part in them."""
    called: int = 0
    """The passed ones in which Convoy was called, and not only a part of the model."""
    excluded: dict[str, str] = field(default_factory=dict)
    """They did not pass, and an exclusion says why."""
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """The suite itself skips them: they need a GPU, or another kind of model."""
    without_convoy: list[str] = field(default_factory=list)
    """They passed, and Convoy had no part: they are not counted."""
    stale: list[str] = field(default_factory=list)
    """Exclusions that no case needs."""

    @property
    def good(self) -> bool:
        """Whether every case that ran passed or is excluded, and every exclusion is needed."""
        return bool(self.passed) and not self.failed and not self.stale

    def row(self) -> dict[str, Any]:
        """The counts, and each reason with the number of its cases."""
        return {
            "passed": len(self.passed),
            "passed_with_a_call": self.called,
            "excluded": len(self.excluded),
            "failed": len(self.failed),
            "skipped_by_the_suite": len(self.skipped),
            "passed_without_convoy": len(self.without_convoy),
            "exclusions": dict(sorted(Counter(self.excluded.values()).items())),
            "skips": dict(sorted(Counter(self.skipped.values()).items())),
        }


def tally(
    records: Iterable[dict[str, Any]], exclusions: Sequence[Exclusion], *, complete: bool
) -> Tally:
    """Count the lines that :mod:`tests.foreign.recorder` wrote.

    ``complete`` says that all of the suite has run: then an exclusion that no case needs is stale.
    An exclusion that fits a passed case is stale anyway.
    """
    result, needed = Tally(), set()
    for record in records:
        case, outcome, why = record["case"], record["outcome"], record["why"]
        fitting = [line for line in exclusions if line.matches(case)]
        if outcome in ("failed", "unrun") and fitting:
            result.excluded[case] = fitting[0].reason
            needed.update(fitting)
        elif outcome == "failed":
            result.failed[case] = why
        elif outcome == "skipped":
            result.skipped[case] = why.splitlines()[0] if why else ""
        elif fitting:
            result.stale.append(f"{fitting[0].case}: {case} passes")
        elif not record["touched"]:
            result.without_convoy.append(case)
        else:
            result.passed.append(case)
            result.called += CALLED in record["touched"]
    if complete:
        passing = {line.split(": ")[0] for line in result.stale}
        result.stale += [
            f"{line.case}: no case fails that this line fits"
            for line in exclusions
            if line not in needed and line.case not in passing
        ]
    return result
