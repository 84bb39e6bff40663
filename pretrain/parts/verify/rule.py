"""Silent data corruption: what the digests of replicas say. Pure decisions from exchanged numbers.

Replicas (``parallel.dp_replicate``) hold equal shards, so their parameters must have equal bits. A
replica that computes another's micro-batches must get gradients of equal bits, because all shapes
and all sums are equal.

Legend: R replicas. Rank r of the run has one row of digests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel.layout import Place, Topology

Row = Sequence[int]
"""The digests of one rank."""


@dataclass(frozen=True)
class Finding:
    """What a mismatch says about ranks."""

    ranks: tuple[int, ...]
    """Ranks whose numbers may be wrong."""
    certain: bool
    """Whether the numbers of exactly these ranks are wrong, as far as numbers can tell. Else one of
    these ranks, or some of these ranks, have wrong numbers."""


@dataclass(frozen=True)
class GradientPass:
    """The gradients of a step, computed once on every rank."""

    shift: int
    """Replica i computed the micro-batches of replica (i + shift) modulo R."""
    rows: Sequence[Row]
    """Of every rank, the digests of its gradients: before the sum over the ranks of the replica,
    and after that sum."""


def replica_sets(topology: Topology) -> list[list[int]]:
    """The sets of ranks that hold equal shards; the ranks of a set are in the order of replicas."""
    sets: defaultdict[Place, list[int]] = defaultdict(list)
    for rank in range(topology.world):
        sets[topology.place(rank)._replace(dp_replicate=0)].append(rank)
    return list(sets.values())


def judge_states(rows: Sequence[Row], topology: Topology) -> Finding | None:
    """Compare the digests of states among replicas; None where all are equal.

    Where more than half of a set's ranks agree, the other ranks of the set are named. Else all
    ranks of the set are.
    """
    accused: set[int] = set()
    certain = True
    for ranks in replica_sets(topology):
        votes = Counter(tuple(rows[rank]) for rank in ranks)
        if len(votes) == 1:
            continue
        wrong, clear = _outvoted([(rank, tuple(rows[rank])) for rank in ranks])
        accused |= wrong
        certain &= clear
    return Finding(tuple(sorted(accused)), certain) if accused else None


def next_shifts(topology: Topology) -> list[int]:
    """The shifts of the passes that a mismatch between shift 0 and the check asks for.

    With three replicas or more a third replica computes each replica's micro-batches. With two,
    both replicas repeat both passes. With one, the pass is repeated.
    """
    return {1: [0], 2: [0, 1]}.get(topology.dp_replicate, [2])


def gradients_agree(passes: Sequence[GradientPass], topology: Topology) -> bool:
    """Whether all passes have equal digests of every replica's gradients."""
    return all(
        len({opinion for _, opinion in opinions}) == 1
        for column in _columns(passes)
        for opinions in _opinions(passes, topology, column)
    )


def judge_gradients(passes: Sequence[GradientPass], topology: Topology) -> Finding | None:
    """Whose gradients are wrong; None where all passes agree.

    A rank that computed other bits for equal micro-batches in two passes is named. Else a rank is
    named whose bits are not those of most ranks. Else all ranks that computed these micro-batches
    are. Digests before the sum over a replica's ranks decide where they differ: they depend on
    fewer ranks.

    A finding that names all ranks of the run is not certain: kernels that do not give equal bits
    when repeated look so.
    """
    for column in _columns(passes):
        repeated: set[int] = set()
        outvoted: set[int] = set()
        certain = True
        for opinions in _opinions(passes, topology, column):
            if len({opinion for _, opinion in opinions}) == 1:
                continue
            own: dict[int, set[int]] = {}
            for rank, opinion in opinions:
                own.setdefault(rank, set()).add(opinion)
            repeated |= {rank for rank, bits in own.items() if len(bits) > 1}
            wrong, clear = _outvoted(opinions)
            outvoted |= wrong
            certain &= clear
        if repeated or outvoted:
            ranks = repeated or outvoted
            certain = bool(repeated) or certain
            return Finding(tuple(sorted(ranks)), certain and len(ranks) < len(passes[0].rows))
    return None


def _columns(passes: Sequence[GradientPass]) -> range:
    return range(len(passes[0].rows[0]))


def _opinions(
    passes: Sequence[GradientPass], topology: Topology, column: int
) -> Iterator[list[tuple[int, int]]]:
    """For each replica and place in a replica: (rank, digest) of all who computed its gradients."""
    for ranks in replica_sets(topology):
        for batches_of in range(len(ranks)):
            found = []
            for one in passes:
                rank = ranks[(batches_of - one.shift) % len(ranks)]
                found.append((rank, one.rows[rank][column]))
            yield found


def _outvoted(opinions: Sequence[tuple[int, object]]) -> tuple[set[int], bool]:
    """The ranks that are not of the majority, and True; all ranks and False without a majority."""
    votes = Counter(opinion for _, opinion in opinions)
    most, count = votes.most_common(1)[0]
    if 2 * count > len(opinions):
        return {rank for rank, opinion in opinions if opinion != most}, True
    return {rank for rank, _ in opinions}, False


def machine_to_exclude(finding: Finding, machines: Sequence[str]) -> str | None:
    """The machine that must not go on, or None where that cannot be said.

    A machine is excluded where the finding is certain, all named ranks are on this machine, and the
    run has other machines.

    Args:
        finding: of a check.
        machines: the machine of every rank.
    """
    named = {machines[rank] for rank in finding.ranks}
    if not finding.certain or len(named) != 1 or len(set(machines)) == 1:
        return None
    return named.pop()
