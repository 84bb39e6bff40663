"""All interleavings of three replicas in a step, with faults at every message.

The model has what the running code does between two steps: replicas exchange their vectors, a
replica that has all vectors moves on, a replica that cannot get them comes to a meeting, any
replica proposes the next epoch by :func:`cluster.members.decide`, the first proposal stands, and a
replica that is behind takes the vectors from the source. At every point a replica may die.

| state | meaning | leaves the state by |
|---|---|---|
| step | exchanges vectors of the turn ``turn + 1`` | all vectors are there; or a member is gone |
| meets | has said its word at the meeting after its epoch | an epoch that is decided |
| settles | is in an epoch, and is behind its source | the source's vectors; or a member is gone |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from cluster.members import Epoch, Life, Word, decide

R = 3
TURNS = 2
"""Barriers that the run passes before it ends."""


@dataclass(frozen=True)
class Replica:
    state: str = "step"
    alive: bool = True
    turn: int = 0
    got: frozenset[int] = frozenset()
    """Members whose vector of the next turn is here."""
    sent: frozenset[tuple[int, int]] = frozenset()
    """The turns and epochs of which this replica has sent its vector."""
    committed: tuple[tuple[int, int], ...] = ()
    """The turn, and the epoch whose vectors were taken, of each update."""
    epoch: int = 1


@dataclass(frozen=True)
class World:
    replicas: tuple[Replica, ...]
    epochs: tuple[Epoch, ...]
    words: frozenset[tuple[int, int, Word]] = frozenset()
    rows: frozenset[tuple[int, int]] = frozenset()
    """Epochs whose source has written vectors for those behind, and the vectors' epoch."""
    faults: int = 0

    def put(self, i: int, **changes: object) -> World:
        replicas = list(self.replicas)
        replicas[i] = replace(replicas[i], **changes)  # type: ignore[arg-type]
        return replace(self, replicas=tuple(replicas))

    def members(self, number: int) -> list[int]:
        return [life.seat for life in self.epochs[number - 1].lives]


def successors(world: World, most_faults: int) -> Iterator[World]:
    for i, own in enumerate(world.replicas):
        if not own.alive:
            continue
        if world.faults < most_faults:
            yield replace(world.put(i, alive=False), faults=world.faults + 1)
        if own.state == "step" and own.turn < TURNS:
            yield from exchange(world, i)
        if own.state == "meets":
            yield from meet(world, i)
        if own.state == "settles":
            yield from settle(world, i)
        over = not all(world.replicas[j].alive for j in world.members(own.epoch))
        if own.state != "meets" and over:
            word = Word(ready=True, turn=own.turn, least_turn=own.turn)
            said = world.words | {(own.epoch, i, word)}
            yield replace(world.put(i, state="meets", got=frozenset()), words=said)


def exchange(world: World, i: int) -> Iterator[World]:
    own = world.replicas[i]
    key = (own.turn + 1, own.epoch)
    if key not in own.sent:
        yield world.put(i, sent=own.sent | {key})
        return
    for j in world.members(own.epoch):
        # What was sent may arrive also after its sender's death, or never.
        if j not in own.got and key in world.replicas[j].sent:
            yield world.put(i, got=own.got | {j})
    if own.got == frozenset(world.members(own.epoch)):
        committed = (*own.committed, key)
        yield world.put(i, turn=own.turn + 1, committed=committed, got=frozenset())


def meet(world: World, i: int) -> Iterator[World]:
    own = world.replicas[i]
    if len(world.epochs) > own.epoch:
        after = world.epochs[own.epoch]
        assert i in [life.seat for life in after.lives], "a living replica that came is a member"
        behind = own.turn < after.turn
        yield world.put(i, epoch=own.epoch + 1, state="settles" if behind else "step")
        return
    words = {Life(j, 0): word for number, j, word in world.words if number == own.epoch}
    dead = [j for j in world.members(own.epoch) if not world.replicas[j].alive]
    gone = {Life(j, 0): "dead" for j in dead}
    proposal = decide(world.epochs[own.epoch - 1], words, gone, [])
    if proposal is not None:
        yield replace(world, epochs=(*world.epochs, proposal))


def settle(world: World, i: int) -> Iterator[World]:
    own, epoch = world.replicas[i], world.epochs[world.replicas[i].epoch - 1]
    source = world.replicas[epoch.lives[epoch.source].seat]
    written = [vectors for number, vectors in world.rows if number == own.epoch]
    if written:
        committed = (*own.committed, (own.turn + 1, written[0]))
        yield world.put(i, turn=own.turn + 1, committed=committed, state="step")
    elif source.alive and source.epoch == own.epoch and source.state == "step":
        yield replace(world, rows=world.rows | {(own.epoch, source.committed[-1][1])})


def explore(most_faults: int) -> tuple[int, int]:
    """Check every reachable state; returns how many there are, and how many are ends."""
    lives = tuple(Life(i, 0) for i in range(R))
    begin = World(tuple(Replica() for _ in range(R)), (Epoch(1, lives, source=0),))
    seen, todo, ends = {begin}, [begin], 0
    while todo:
        world = todo.pop()
        living = [own for own in world.replicas if own.alive]
        turns = {own.turn for own in living}
        assert max(turns, default=0) - min(turns, default=0) <= 1
        for own in living:
            assert [turn for turn, _ in own.committed] == list(range(1, own.turn + 1))
        after = list(successors(world, most_faults))
        if not any(other.faults == world.faults for other in after) and living:
            ends += 1
            assert turns == {TURNS}, "nobody waits for ever"
            assert len({own.committed for own in living}) == 1, "one history, of equal vectors"
        for other in after:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return len(seen), ends


@pytest.mark.parametrize(("faults", "least"), [(0, 50), (1, 1_000), (2, 10_000)])
def test_survivors_have_one_history_whatever_dies_when(faults, least):
    states, ends = explore(faults)
    assert states > least
    assert ends
