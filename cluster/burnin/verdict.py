"""What a burn-in has found: measured numbers, bad machines, and the lines for people."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from cluster.burnin.links import Link

VERSION = 1
"""Of the JSON that :meth:`Verdict.as_dict` gives."""


@dataclass(frozen=True)
class RankFacts:
    """A rank, as it says of itself."""

    rank: int
    node: str
    """As the exclude list names machines."""
    local_rank: int
    kind: str
    """The model of the device."""


@dataclass(frozen=True)
class Finding:
    """Something wrong with a machine."""

    node: str
    rank: int | None
    """None: the machine as a whole."""
    check: str
    reason: str

    def line(self) -> str:
        """For people."""
        who = "" if self.rank is None else f", rank {self.rank}"
        return f"{self.node}{who}: {self.check}: {self.reason}"


@dataclass
class Verdict:
    """The findings, and what was measured."""

    ranks: list[RankFacts]
    findings: list[Finding] = field(default_factory=list)
    measured: dict[str, Any] = field(default_factory=dict)
    """By check: a number for each rank, or the links."""
    ended_in: str | None = None
    """The check that did not end, where the burn-in could not go on."""
    not_judged: list[str] = field(default_factory=list)
    """Checks that had too few values to compare."""
    failures: list[str] = field(default_factory=list)
    """Checks that failed, and whose failure names no machine."""

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found."""
        return not self.findings and not self.failures and self.ended_in is None

    @property
    def bad_nodes(self) -> dict[str, str]:
        """The machines to leave out, each with its first reason."""
        reasons: dict[str, str] = {}
        for finding in self.findings:
            reasons.setdefault(finding.node, f"burn-in, {finding.check}: {finding.reason}")
        return reasons

    def blame(self, rank: int, check: str, reason: str) -> None:
        """Note a finding about a rank."""
        self.findings.append(Finding(self.ranks[rank].node, rank, check, reason))

    def note_failure(self, check: str, errors: Mapping[int, str]) -> None:
        """Note that a check failed on some ranks, where this says nothing of their machines.

        Args:
            check: its name.
            errors: by rank; nothing is noted of none.
        """
        if errors:
            first = min(errors)
            self.failures.append(
                f"{check} failed on {len(errors)} of {len(self.ranks)} ranks, rank {first}: "
                f"{errors[first]}"
            )

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "burn_in_version": VERSION,
            "is_sound": self.is_sound,
            "bad_nodes": self.bad_nodes,
            **asdict(self),
        }

    def lines(self) -> list[str]:
        """For people: what was measured, and a line for each finding."""
        lines = []
        for check, values in self.measured.items():
            rates = [v["bytes_per_second"] for v in values] if check == "links" else values
            rates = [rate for rate in rates if rate]
            if not rates:
                continue
            unit, scale = ("TFLOP/s", 1e12) if check == "products" else ("GB/s", 1e9)
            lines.append(
                f"{check:<14} median {median(rates) / scale:.3f} {unit}, "
                f"{min(rates) / scale:.3f} to {max(rates) / scale:.3f}"
            )
        if self.not_judged:
            names = ", ".join(self.not_judged)
            lines.append(f"too few of one kind to compare, shown only: {names}")
        lines += [*self.failures, *(finding.line() for finding in self.findings)]
        nodes = len({rank.node for rank in self.ranks})
        ending = f"; the burn-in ended in {self.ended_in}" if self.ended_in else ""
        bad = len(self.bad_nodes)
        lines.append(f"{nodes - bad} of {nodes} machines are sound{ending}")
        return lines


def slow_ranks(
    rates: Sequence[float], kinds: Sequence[str], tolerance: float, expected: float | None = None
) -> dict[int, str]:
    """Ranks whose rate is below the median of their kind by ``tolerance`` or more, or so far below
    what is expected, and by how much.

    Args:
        rates: of each rank, higher is better.
        kinds: of each rank's device; a kind with fewer than three ranks is not compared.
        tolerance: a fraction of the median, and of ``expected``.
        expected: of every rank; None where nothing is known.
    """
    groups: Mapping[str, list[int]] = defaultdict(list)
    for rank, kind in enumerate(kinds):
        groups[kind].append(rank)
    reasons = {}
    for ranks in groups.values():
        middle = median(rates[rank] for rank in ranks)
        for rank in ranks:
            if len(ranks) >= 3 and rates[rank] <= (1 - tolerance) * middle:
                reasons[rank] = f"{100 * (1 - rates[rank] / middle):.0f} % slower than the median"
            elif expected is not None and rates[rank] <= (1 - tolerance) * expected:
                reasons[rank] = f"{100 * (1 - rates[rank] / expected):.0f} % slower than expected"
    return reasons


def describe_links(
    node: str, bad: Sequence[Link], links: Sequence[Link], nodes: Sequence[str],
    expected: Mapping[bool, float] | None = None,
) -> str:  # fmt: skip
    """Why a node is named for its links: how many are bad, and the worst of them."""
    mine = [k for k in links if node in (nodes[k.first], nodes[k.second])]
    worst = min(bad, key=lambda link: link.bytes_per_second)
    pair = f"ranks {worst.first} and {worst.second}"
    if worst.error is not None:
        what = f"between {pair}: {worst.error}"
    else:
        group = [k.bytes_per_second for k in links if k.within_node == worst.within_node]
        share = worst.bytes_per_second / median(group)
        what = (
            f"{worst.bytes_per_second / 1e9:.3f} GB/s between {pair}, {100 * share:.0f} % of the "
            f"median"
        )
        if expected is not None:
            share = worst.bytes_per_second / expected[worst.within_node]
            what += f", {100 * share:.0f} % of what is expected"
    other = nodes[worst.first] if nodes[worst.first] != node else nodes[worst.second]
    either = f"; the other end is {other}" if len(bad) == 1 and other != node else ""
    return f"{len(bad)} of {len(mine)} links are bad, {what}{either}"
