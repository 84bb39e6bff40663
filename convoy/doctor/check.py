"""What a check declares, and what it says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """One known corruption: what it is, what shows it, and what to do."""

    name: str
    """A word that ``--json`` and the page have."""
    wrong: str
    """What went wrong, one clause."""
    needs: str
    """The evidence without which the check is silent."""
    threads: tuple[str, ...]
    """Where users met it, as repo#number."""
    advice: str
    """What to do."""


@dataclass(frozen=True)
class Finding:
    """One corruption in one checkpoint."""

    check: Check
    evidence: str
    """The numbers, for people."""
    layers: tuple[int, ...] = ()
    """None where the finding is of no layer."""
    experts: tuple[int, ...] = ()
    """None where the finding is of all experts or of none."""
    arrays: tuple[str, ...] = ()
    numbers: dict[str, Any] = field(default_factory=dict)
    """The evidence for programs."""

    def line(self) -> str:
        """One line for people."""
        where = [f"layer{'s'[: len(self.layers) != 1]} {ranges(self.layers)}"] * bool(self.layers)
        where += [f"expert{'s'[: len(self.experts) != 1]} {ranges(self.experts)}"] * bool(
            self.experts
        )
        arrays = ", ".join(self.arrays[:2])
        more = f" and {len(self.arrays) - 2} more" if len(self.arrays) > 2 else ""
        where_in = ", ".join([*where, *([f"{arrays}{more}"] if arrays else [])])
        known = f" (known: {', '.join(self.check.threads)})" if self.check.threads else ""
        of = f"{where_in}: " if where_in else ""
        return (
            f"{self.check.name}: {of}{self.check.wrong}: {self.evidence}{known}; "
            f"{self.check.advice}"
        )

    def as_json(self) -> dict[str, Any]:
        """The finding for programs."""
        return {
            "check": self.check.name,
            "wrong": self.check.wrong,
            "layers": list(self.layers),
            "experts": list(self.experts),
            "arrays": list(self.arrays),
            "evidence": self.evidence,
            "numbers": self.numbers,
            "known": list(self.check.threads),
            "advice": self.check.advice,
        }


def ranges(numbers: Iterable[int]) -> str:
    """``0-3, 7`` of 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of one check and of the same experts in several layers as one."""
    groups: dict[tuple[str, tuple[int, ...]], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.check.name, finding.experts), []).append(finding)
    made = []
    for group in groups.values():
        layers = tuple(sorted({layer for finding in group for layer in finding.layers}))
        arrays = tuple(dict.fromkeys(name for finding in group for name in finding.arrays))
        first = group[0]
        also = f", and alike in {len(group) - 1} more" if len(group) > 1 else ""
        made.append(
            Finding(first.check, first.evidence + also, layers, first.experts, arrays,
                    first.numbers)
        )  # fmt: skip
    return made
