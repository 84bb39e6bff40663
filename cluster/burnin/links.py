"""Links between ranks: each pair sends to each other and is timed, in rounds without overlap.

Pairs within a node are all pairs of the node's ranks. Between nodes a rank meets the ranks with its
own local rank: with a network card for each accelerator, every card meets every other card of its
rail. Within a round every rank is in at most one pair.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from cluster.burnin.board import Board
from cluster.burnin.measures import synchronize

_LATENCY_TRIPS = 20
_BANDWIDTH_TRIPS = 3
Pair = tuple[int, int]
"""Two ranks."""


@dataclass(frozen=True)
class Link:
    """One measured pair of ranks."""

    first: int
    second: int
    within_node: bool
    bytes_per_second: float
    """In each direction, while both send. 0 where the pair could not exchange anything."""
    latency_seconds: float
    """Half of a round trip of 8 bytes."""
    error: str | None = None
    """What failed, where something did."""

    @property
    def pair(self) -> Pair:
        """Its ranks."""
        return self.first, self.second


def rounds_of(nodes: Sequence[str]) -> Iterator[list[Pair]]:
    """Pairs of ranks, round by round: every pair that is to be measured is in one round.

    Args:
        nodes: the node of each rank.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        ranks_of.setdefault(node, []).append(rank)
    members = list(ranks_of.values())
    for rounds in zip(*(_tournament(len(m), most=max(map(len, members))) for m in members),
                     strict=True):  # fmt: skip
        yield [
            (ranks[a], ranks[b]) for ranks, pairs in zip(members, rounds, strict=True)
            for a, b in pairs
        ]  # fmt: skip
    for pairs in _tournament(len(members), most=len(members)):
        yield [
            (first, two)
            for a, b in pairs
            for first, two in zip(members[a], members[b], strict=False)
        ]


def _tournament(players: int, most: int) -> list[list[Pair]]:
    """Every pair of ``players`` once, by the circle method; as many rounds as for ``most``."""

    def rounds(number: int) -> int:
        return number - 1 + number % 2

    seats = [*range(players), *([-1] if players % 2 else [])]
    paired = []
    for _ in range(max(0, rounds(players)) if players > 1 else 0):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        paired.append([(min(p), max(p)) for p in pairs if -1 not in p])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    wanted = rounds(most) if most > 1 else 0
    return [*paired, *([] for _ in range(wanted - len(paired)))]


class LinkTest:
    """Measures links of this rank.

    Args:
        nodes: the node of each rank.
        device: on which the tensors are.
        size: bytes in each direction.
    """

    def __init__(self, nodes: Sequence[str], device: torch.device, size: int) -> None:
        self.nodes, self.device, self.size = nodes, device, size

    def measure(self, pairs: Sequence[Sequence[Pair]]) -> list[Link]:
        """The links of this rank, each reported by its first rank. Every rank calls this with the
        pairs of each round.

        After the first link that fails, this rank measures no other: the process group is broken
        then, and :meth:`find_broken` says which links are at fault.
        """
        measured: list[Link] = []
        for pair in _mine(pairs):
            measured.append(self._measure(pair))
            if measured[-1].error is not None:
                break
        return [k for k in measured if k.error is not None or k.first == dist.get_rank()]

    def find_broken(
        self, pairs: Sequence[Sequence[Pair]], board: Board, timeout: timedelta
    ) -> list[Link]:
        """The links that fail, each tried in a process group of its own. Every rank calls this.

        A rank with two failed links is not tried again: each failure takes up to ``timeout``.
        """
        broken: dict[Pair, Link] = {}
        for one_round in pairs:
            failures = Counter(rank for pair in broken for rank in pair)
            tried = [pair for pair in one_round if max(failures[rank] for rank in pair) < 2]
            mine: Link | None = None
            for pair in _mine([tried]):
                try:
                    group = dist.new_group(
                        list(pair), timeout=timeout, use_local_synchronization=True
                    )
                    mine = self._measure(pair, group)
                except RuntimeError as failed:
                    mine = self._failed(pair, failed)
            bad = None if mine is None or mine.error is None else asdict(mine)
            for fields in board.share("links", bad):
                if fields is not None:
                    link = Link(**fields)
                    broken[link.pair] = link
        return list(broken.values())

    def _link(self, pair: Pair, rate: float, latency: float, error: str | None) -> Link:
        within = self.nodes[pair[0]] == self.nodes[pair[1]]
        return Link(*pair, within, rate, latency, error)

    def _failed(self, pair: Pair, error: Exception) -> Link:
        return self._link(pair, 0.0, 0.0, " ".join(str(error).split())[:200])

    def _measure(self, pair: Pair, group: dist.ProcessGroup | None = None) -> Link:
        """The link between this rank and another one; both call this."""
        rank, first = dist.get_rank(), pair[0]
        peer = pair[1] if rank == first else first
        mine = torch.full((self.size,), rank % 251, dtype=torch.uint8, device=self.device)
        theirs = torch.empty_like(mine)
        word = torch.zeros(1, dtype=torch.int64, device=self.device)

        def trip() -> float:
            """Seconds of a round trip of 8 bytes, which the first rank begins."""
            began = time.perf_counter()
            for sends in (rank == first, rank != first):
                if sends:
                    dist.send(word, peer, group)
                else:
                    dist.recv(word, peer, group)
            synchronize(self.device)
            return time.perf_counter() - began

        def exchange() -> float:
            """Seconds in which both ranks receive all of the other's bytes."""
            trip()  # both begin at once
            began = time.perf_counter()
            operations = [
                dist.P2POp(dist.isend, mine, peer, group),
                dist.P2POp(dist.irecv, theirs, peer, group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            synchronize(self.device)
            return time.perf_counter() - began

        try:
            latency = min(trip() for _ in range(_LATENCY_TRIPS)) / 2
            rate = self.size / min(exchange() for _ in range(_BANDWIDTH_TRIPS))
        except RuntimeError as failed:
            return self._failed(pair, failed)
        wrong = not bool((theirs == peer % 251).all())
        error = f"rank {rank} received other bytes than rank {peer} sent" if wrong else None
        return self._link(pair, rate, latency, error)


def _mine(pairs: Sequence[Sequence[Pair]]) -> Iterator[Pair]:
    rank = dist.get_rank()
    return (pair for one_round in pairs for pair in one_round if rank in pair)


def slow_links(
    links: Sequence[Link], share: float, expected: Mapping[bool, float] | None = None
) -> list[Link]:
    """Links that failed, and those at or below ``share`` of the median bandwidth of their class, or
    of what is expected of their class.

    The classes are links within a node and links between nodes. A class of fewer than three links
    is not compared with its median.

    Args:
        links: the links of all ranks.
        share: of a bandwidth.
        expected: bytes per second in each direction, by whether a link is within a node; None
            where nothing is known.
    """
    bad = [link for link in links if link.error is not None]
    for within in (True, False):
        group = [k for k in links if k.within_node == within and k.error is None]
        limit = -1.0 if expected is None else share * expected[within]
        if len(group) >= 3:
            limit = max(limit, share * median(link.bytes_per_second for link in group))
        bad += [link for link in group if link.bytes_per_second <= limit]
    return bad


def nodes_of_links(
    bad: Sequence[Link], nodes: Sequence[str], slow_nodes: Set[str] = frozenset()
) -> dict[str, list[Link]]:
    """The fewest nodes that touch every bad link, by the greedy rule, each with its bad links.

    The node with the most bad links comes first. Among nodes with equally many, one of
    ``slow_nodes`` does: a node that computes slowly sends slowly too. Then the node of the highest
    rank does: of a single bad link between two nodes, the second one is named.

    Args:
        bad: the bad links.
        nodes: the node of each rank.
        slow_nodes: nodes that were found slow without a link.
    """
    named: dict[str, list[Link]] = {}
    left = list(bad)
    while left:
        counts = Counter(node for link in left for node in {nodes[link.first], nodes[link.second]})
        last_rank = {node: rank for rank, node in enumerate(nodes)}
        worst = max(counts, key=lambda n: (counts[n], n in slow_nodes, last_rank[n]))
        named[worst] = [k for k in left if worst in (nodes[k.first], nodes[k.second])]
        left = [link for link in left if link not in named[worst]]
    return named
