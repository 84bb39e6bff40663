"""The burn-in: one check after another on all ranks, and a verdict on the machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from cluster.burnin.board import Board, MissingRanksError
from cluster.burnin.links import Link, LinkTest, Pair, nodes_of_links, rounds_of, slow_links
from cluster.burnin.measures import (
    all_reduce,
    all_to_all,
    memory_fault,
    product_rate,
    storage_rates,
    turns,
)
from cluster.burnin.numerics import arithmetic_hash, differing, kind_of
from cluster.burnin.verdict import Finding, RankFacts, Verdict, describe_links, slow_ranks
from cluster.members import node_name

_REPEATS = 3
"""Measurements of a rank, whose best counts, and of a link, which all must be slow."""
_STORAGE_REPEATS = 6
_NUMERIC_REPEATS = 2


@dataclass(frozen=True)
class ExpectedRates:
    """What sound machines reach: without it machines that are all slow look sound."""

    products: float
    """FLOP/s of a rank in the check of products."""
    links: Mapping[bool, float]
    """Bytes per second in each direction: True within a node, False between nodes."""


@dataclass(frozen=True)
class BurnInOptions:
    """What a burn-in checks, and how strictly."""

    device: torch.device
    local_rank: int
    local_world: int
    timeout: timedelta
    """Of the process group: what one operation may take."""
    folder: Path | None = None
    """The folder of checkpoints; None leaves storage out."""
    slow: float = 0.1
    """A rank is slow that is below the median by this fraction or more."""
    slow_link: float = 0.5
    """A link is slow that is at or below this share of the median."""
    slow_storage: float = 0.5
    """A rank's storage is slow that is at or below this share of the median."""
    expected: ExpectedRates | None = None
    """What ranks and links are compared with beside the median."""
    link_bytes: int = 1 << 26
    reduce_bytes: int = 1 << 26
    rows: int = 32_768
    """Rows of each rank in the all-to-all: tokens x top_k."""
    row_bytes: int = 4_096
    """d_model x bytes of a number."""
    memory_bytes: int = 1 << 30
    """Written and read on a CPU."""
    storage_bytes: int = 1 << 28
    training_step: Callable[[torch.device], str] | None = None
    """A few steps of training on this rank alone; returns a hash of what was learned."""


class BurnIn:
    """One burn-in of all ranks of the default process group.

    Args:
        board: of these ranks. Its limit must be above the time-out of the process group, so that
            ranks that wait for a lost one answer before the limit.
        options: the same on every rank, but for device and local rank.
    """

    def __init__(self, board: Board, options: BurnInOptions) -> None:
        self.board, self.options = board, options
        self.rank = board.rank

    def run(self, say: Callable[[str], None] = lambda line: None) -> Verdict:
        """Carry out all checks; every rank gets the same verdict.

        Args:
            say: is told the name of each check before it begins.

        Raises MissingRanksError where ranks have not even said who they are.
        """
        o = self.options
        facts = RankFacts(self.rank, node_name(), o.local_rank, kind_of(o.device))
        ranks = [RankFacts(**fields) for fields in self.board.share("start", asdict(facts))]
        self.verdict = Verdict(ranks)
        self.kinds, self.nodes = [rank.kind for rank in ranks], [rank.node for rank in ranks]
        self.link_test = LinkTest(self.nodes, o.device, o.link_bytes)
        checks: dict[str, Callable[[str], None]] = {
            "memory": self._memory,
            "numerics": partial(
                self._compare, lambda: [arithmetic_hash(o.device) for _ in range(_NUMERIC_REPEATS)]
            ),
            "products": self._products,
            "training step": self._training_step,
            "storage": self._storage,
            "links": self._links,
            "all-to-all": partial(
                self._collective, lambda: all_to_all(o.device, o.rows, o.row_bytes)
            ),
            "all-reduce": partial(self._collective, lambda: all_reduce(o.device, o.reduce_bytes)),
        }
        for name, check in checks.items():
            say(name)
            try:
                check(name)
            except MissingRanksError as error:
                self.verdict.ended_in = name
                for rank in error.ranks:
                    self.verdict.blame(rank, name, f"no answer within {self.board.seconds:g} s")
            if self.verdict.ended_in is not None:
                break
        return self.verdict

    def _ask(self, name: str, act: Callable[[], Any], *, blames: bool = True) -> list[Any] | None:
        """What ``act`` returns on each rank; None where it failed on one.

        A failure is a finding about its rank, if ``blames`` and if another rank has not failed.
        """
        try:
            answer = {"value": act(), "error": None}
        except (RuntimeError, ValueError, OSError) as failed:
            answer = {"value": None, "error": " ".join(str(failed).split())[:200]}
        answers = self.board.share(name, answer)
        errors = {r: a["error"] for r, a in enumerate(answers) if a["error"] is not None}
        if not blames or len(errors) == self.board.world > 1:
            self.verdict.note_failure(name, errors)
        else:
            for rank, error in errors.items():
                self.verdict.blame(rank, name, error)
        return None if errors else [a["value"] for a in answers]

    def _memory(self, name: str) -> None:
        o = self.options
        for rank, fault in enumerate(
            self._ask(name, lambda: memory_fault(o.device, o.memory_bytes)) or ()
        ):
            if fault is not None:
                self.verdict.blame(rank, name, fault)

    def _training_step(self, name: str) -> None:
        step = self.options.training_step
        if step is not None:
            self._compare(lambda: [step(self.options.device)], name)

    def _compare(self, act: Callable[[], list[str]], name: str) -> None:
        hashes = self._ask(name, act)
        for rank, reason in (differing(self.kinds, hashes) if hashes else {}).items():
            self.verdict.blame(rank, name, reason)

    def _products(self, name: str) -> None:
        o = self.options

        def measure() -> list[float] | None:
            """Ranks that would share cores take turns."""
            rates: list[float] = []
            count = max(self.board.share(name, turns(o.local_world, o.device)))
            for turn in range(count):
                is_mine = o.local_rank % count == turn
                measured = self._ask(
                    name, partial(product_rate, o.device) if is_mine else lambda: None
                )
                if measured is None:
                    return None
                rates = [old or new for old, new in zip(rates or measured, measured, strict=True)]
            return rates

        expected = None if o.expected is None else o.expected.products
        self._judge(name, measure, o.slow, expected=expected)

    def _judge(
        self, name: str, measure: Callable[[], list[float] | None], slow: float,
        repeats: int = _REPEATS, expected: float | None = None,
    ) -> None:  # fmt: skip
        """Blame ranks whose best of some measurements is slow against the others' best: what else
        a machine does for a moment slows one measurement, and a fault slows all of them."""
        suspects: dict[int, str] = {}
        best: list[float] = []
        for _ in range(repeats):
            rates = measure()
            if rates is None:
                return
            best = list(map(max, best or rates, rates))
            suspects = slow_ranks(best, self.kinds, slow, expected)
            if not suspects:
                break
        self.verdict.measured[name] = best
        for rank, why in suspects.items():
            self.verdict.blame(rank, name, why)
        if expected is None and max(map(self.kinds.count, self.kinds)) < 3:
            self.verdict.not_judged.append(name)

    def _storage(self, name: str) -> None:
        o = self.options
        if o.folder is None:
            return
        folder = o.folder

        def make() -> None:
            if self.rank == 0:
                folder.mkdir(parents=True, exist_ok=True)

        # Only rank 0 makes the folder: a machine that does not share the folder must not have one.
        if self._ask(name, make, blames=False) is None:
            return

        def measure(which: int) -> list[float] | None:
            rates = self._ask(name, lambda: storage_rates(folder, self.rank, o.storage_bytes))
            return None if rates is None else [of_rank[which] for of_rank in rates]

        slow, repeats = 1 - o.slow_storage, _STORAGE_REPEATS
        self._judge("storage write", lambda: measure(0), slow, repeats)
        self._judge("storage read", lambda: measure(1), slow, repeats)

    def _links(self, name: str) -> None:
        o = self.options
        pairs = list(rounds_of(self.nodes))
        links = self._measured(name, pairs)
        if any(link.error is not None for link in links):
            self._blame_broken_links(links)
            self.verdict.ended_in = name
            return
        expected = None if o.expected is None else o.expected.links
        bad = slow_links(links, o.slow_link, expected)
        for _ in range(_REPEATS - 1):
            again = self._measured(name, _again(bad, links, pairs))
            rates = {link.pair: link.bytes_per_second for link in again}
            links = [replace(k, bytes_per_second=rates.get(k.pair, k.bytes_per_second))
                     for k in links]  # fmt: skip
            bad = [k for k in slow_links(links, o.slow_link, expected) if k.pair in rates]
        self.verdict.measured[name] = [asdict(link) for link in links]
        if expected is not None:
            bad = self._note_slow_network(bad, links, expected[False])
        self._blame_links(bad, links)
        for within, what in ((True, "links within a node"), (False, "links between nodes")):
            few = 0 < sum(link.within_node == within for link in links) < 3
            if few and expected is None:
                self.verdict.not_judged.append(what)

    def _note_slow_network(self, bad: list[Link], links: list[Link], expected: float) -> list[Link]:
        """The bad links of which a machine may be at fault; where all links between nodes are slow,
        a failure is noted, which names none."""
        between = [link.bytes_per_second for link in links if not link.within_node]
        if not between or len(between) > sum(not link.within_node for link in bad):
            return bad
        self.verdict.failures.append(
            f"links: all {len(between)} between nodes are slow: the median is "
            f"{median(between) / 1e9:.3f} GB/s, and {expected / 1e9:.3f} GB/s are expected"
        )
        outliers = slow_links(links, self.options.slow_link)
        return [link for link in bad if link.within_node or link in outliers]

    def _blame_broken_links(self, links: list[Link]) -> None:
        """Find the machines at fault, where something failed that needs several ranks."""
        o = self.options
        bad = self.link_test.find_broken(list(rounds_of(self.nodes)), self.board, o.timeout)
        known = {link.pair: link for link in [*links, *bad]}
        self.verdict.measured["links"] = [asdict(link) for link in known.values()]
        self._blame_links(bad, list(known.values()))

    def _blame_links(self, bad: list[Link], links: list[Link]) -> None:
        slow = {f.node for f in self.verdict.findings if f.check == "products"}
        for node, mine in nodes_of_links(bad, self.nodes, slow).items():
            rates = self.options.expected
            expected = None if rates is None else rates.links
            why = describe_links(node, mine, links, self.nodes, expected)
            self.verdict.findings.append(Finding(node, None, "links", why))

    def _measured(self, name: str, pairs: list[list[Pair]]) -> list[Link]:
        """The links that all ranks have measured; nothing is measured for no pairs."""
        if not pairs:
            return []
        answers = self._ask(name, lambda: [asdict(link) for link in self.link_test.measure(pairs)])
        by_pair: dict[Pair, Link] = {}
        for link in [Link(**fields) for of_rank in answers or () for fields in of_rank]:
            if link.pair not in by_pair or link.error is not None:
                by_pair[link.pair] = link
        return list(by_pair.values())

    def _collective(self, act: Callable[[], tuple[float, str | None]], name: str) -> None:
        if dist.get_world_size() == 1:
            return
        # A broken link fails the collective on every rank, and only its two ends are at fault.
        answers = self._ask(name, act, blames=False)
        if answers is None:
            measured = self.verdict.measured.get("links", ())
            self._blame_broken_links([Link(**fields) for fields in measured])
            self.verdict.ended_in = name
            return
        self.verdict.measured[name] = [rate for rate, _ in answers]
        for rank, (_, wrong) in enumerate(answers):
            if wrong is not None:
                self.verdict.blame(rank, name, f"received {wrong}")


def _again(bad: list[Link], links: list[Link], pairs: list[list[Pair]]) -> list[list[Pair]]:
    """The rounds in which suspects are measured again: each without any other, or, where most links
    are suspects, with as many others as before."""
    suspects = {link.pair for link in bad}
    if 2 * len(suspects) <= len(links):
        return [[link.pair] for link in bad]
    return [[pair for pair in one_round if pair in suspects] for one_round in pairs]
