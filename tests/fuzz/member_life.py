"""Replicas that die, come back and meet: the code of :mod:`pretrain.elastic` over a real store.

Each simulated replica is one rank with the product's own :class:`pretrain.elastic.Membership`, over
a store in this process. Its turn in a meeting ends where the code would sleep; the clock is the
simulation's. The step is simulated: replicas exchange vectors, some may have them and others not
when a member dies, and those behind take them from a replica that has them.

- All who read an epoch read one decision, and its members have one numbering of ranks.
- Each step is committed once in each replica's history, and histories are equal.
- The micro-batches of a step are divided among the members of the epoch, each once.
- A step that a living ready member has committed is never lost.
- Where nothing happens any more, the living replicas meet in one epoch and train on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from itertools import combinations
from types import SimpleNamespace
from unittest import mock

from hypothesis import strategies as st
from torch.distributed import HashStore

from cluster.members import Epoch, Journal, Life
from parallel import Topology
from pretrain.data import Cursor
from pretrain.data.loader import micro_batches
from pretrain.elastic import Membership, Seat, Standing
from tests.fuzz.machine import World, action

SEATS = 4
BATCH, MICRO = 12, 2
SEAT = st.integers(0, SEATS - 1)


class Sleeps(BaseException):
    """The code waits for others."""


@dataclass
class Clock:
    """The simulation's time, as a replica's module ``time``."""

    now: float = 1.0
    began: float | None = None
    """When the replica that acts began to wait: the first reading of a meeting says so."""

    def monotonic(self) -> float:
        """Seconds."""
        value, self.began = (self.now if self.began is None else self.began), None
        return value

    def sleep(self, _: float) -> None:
        """End the replica's turn."""
        raise Sleeps


class Replica(Membership):
    """One replica of one rank. Groups and threads are left out, decisions are not."""

    def __init__(self, life: Life, store: HashStore) -> None:
        self.seat = Seat(life, SEATS, "")
        self.full = Topology(dp_replicate=SEATS)
        self.timeout = timedelta(seconds=40)
        self.index, self.ranks, self.store = 0, 1, store
        self.journal, self.epoch, self.standing = Journal(store), None, Standing()
        self.crossing = SimpleNamespace(why=None)
        self.patience = 10.0
        self.founded = 0
        """The epoch that began with a checkpoint, from which this replica's state comes."""
        self.history: list[tuple[int, int]] = []
        """Since then, the turn of each step, and the epoch whose vectors were taken."""
        self.meets_since: float | None = None
        self.came_at: int | None = None
        self.gone = False

    def _newest(self) -> int:
        """As of the moment at which this replica came: each look begins the wait anew."""
        if self.came_at is None:
            self.came_at = super()._newest()
        return self.came_at

    def meet(self, clock: Clock) -> bool:
        """Look once; whether the next epoch is decided."""
        if self.meets_since is None:
            self.meets_since = clock.now
        clock.began = self.meets_since
        try:
            epoch = self._meet()
        except Sleeps:
            return False
        except SystemExit:
            self.gone = True
            return False
        finally:
            clock.began = None
        if self.seat.life not in epoch.lives:
            self.gone = True
            self.journal.declare_gone(self.seat.life, "it is not among the members")
            return False
        self.epoch, self.meets_since = epoch, None
        return True


class MemberLife(World):
    """See the head of the file."""

    name = "members"
    STEPS = 30

    def __init__(self) -> None:
        self.store, self.clock = HashStore(), Clock()
        self.starts = [0] * SEATS
        self.alive: dict[int, Replica] = {}
        self.behind: set[int] = set()
        """Seats whose replica is in an epoch, and lacks its source's newest step."""
        self._patch = mock.patch("pretrain.elastic.membership.time", self.clock)
        self._patch.start()
        for seat in range(SEATS):
            self.replica_comes(seat)

    def close(self) -> None:
        self._patch.stop()

    def in_epoch(self) -> list[Replica]:
        """Replicas that are in an epoch that is not over for them."""
        return [r for r in self.alive.values() if r.epoch is not None and r.meets_since is None]

    @action(seat=SEAT)
    def replica_comes(self, seat: int) -> None:
        """The processes of a seat start again; its keeper has said that those before are gone."""
        if seat in self.alive:
            return
        life = Life(seat, self.starts[seat])
        if life.start:
            Journal(self.store).declare_gone(Life(seat, life.start - 1), "ended")
        self.starts[seat] += 1
        self.alive[seat] = Replica(life, self.store)

    @action(seat=SEAT, got=st.integers(0, 2**SEATS - 1), told=st.booleans())
    def replica_dies(self, seat: int, got: int, told: bool) -> None:
        """A replica dies in a step, of which some other members may have all vectors.

        Args:
            seat: of the replica.
            got: the seats, as bits, that have the vectors of the step.
            told: whether its keeper says at once that the life is gone.
        """
        members = self.complete()
        replica = self.alive.pop(seat, None)
        if replica is None:
            return
        self.behind.discard(seat)
        if replica in members:
            for other in members:
                if other is not replica and got >> other.seat.life.seat & 1:
                    self.commit(other)
        if told:
            replica.journal.declare_gone(replica.seat.life, "killed")
        for other in self.in_epoch():
            if replica.seat.life in other.epoch.lives:
                other.meets_since = self.clock.now

    def together(self) -> list[Replica]:
        """The members of one epoch where all of them are there, ready and not behind."""
        members = self.in_epoch()
        numbers = {r.epoch.number for r in members}
        if len(numbers) != 1 or self.behind or not all(r.standing.ready for r in members):
            return []
        return members

    def complete(self) -> list[Replica]:
        """The members of an epoch that can take a step: nobody is missing."""
        members = self.together()
        return members if members and len(members) == len(members[0].epoch.lives) else []

    def commit(self, replica: Replica) -> None:
        """One step more, by the vectors of the replica's epoch."""
        assert replica.epoch is not None
        replica.standing.turn += 1
        replica.history.append((replica.standing.turn, replica.epoch.number))

    @action(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        """Steps of an epoch whose members are all there."""
        members = self.complete()
        for _ in range(count if members else 0):
            self.check_division(members)
            for replica in members:
                self.commit(replica)
                replica.standing.done_step = replica.standing.turn

    def check_division(self, members: list[Replica]) -> None:
        """The ranks of an epoch take each micro-batch of a step once."""
        topology = members[0].topology
        ranks = sorted(replica.rank for replica in members)
        assert ranks == list(range(topology.world)), "ranks of an epoch are numbered from 0"
        taken: list[int] = []
        for replica in members:
            assert replica.topology == topology
            number = topology.dp_rank(replica.rank)
            for part in micro_batches(Cursor(0), BATCH, MICRO, number, topology.world):
                taken += part
        assert sorted(taken) == list(range(BATCH)), "each sample of the step once"

    @action(order=st.permutations(list(range(SEATS))), seconds=st.sampled_from([0, 1, 5, 30, 61]))
    def meet(self, order: list[int], seconds: int) -> None:
        """Each replica that waits looks once, in some order."""
        self.clock.now += seconds
        for seat in order:
            replica = self.alive.get(seat)
            if replica is None or replica in self.in_epoch():
                continue
            if replica.meet(self.clock):
                self.begin(replica)
            elif replica.gone:
                del self.alive[seat]
                self.behind.discard(seat)

    def begin(self, replica: Replica) -> None:
        """A replica begins an epoch: from the checkpoint, from the source, or as it is."""
        epoch, seat = replica.epoch, replica.seat.life.seat
        assert epoch is not None
        self.check_one_decision(epoch)
        self.behind.discard(seat)
        if epoch.source is None:
            assert replica.seat.life in epoch.joined
            replica.founded, replica.history = epoch.number, []
            replica.standing = Standing(ready=True)
        elif replica.seat.life in epoch.joined or replica.standing.turn < epoch.turn:
            self.behind.add(seat)

    @action(seat=SEAT)
    def hand_over(self, seat: int) -> None:
        """A replica that is behind gets the source's state, where the source is in the epoch."""
        replica = self.alive.get(seat)
        if replica is None or seat not in self.behind or replica not in self.in_epoch():
            return
        epoch = replica.epoch
        assert epoch is not None
        assert epoch.source is not None
        source = self.alive.get(epoch.lives[epoch.source].seat)
        if source is None or source.epoch != epoch or source.seat.life not in epoch.lives:
            return
        assert source.standing.ready, "the source has the run's state"
        assert source.standing.turn == epoch.turn, "the source has the newest state"
        if replica.standing.ready:
            assert replica.standing.turn == epoch.turn - 1, "nobody is two steps behind"
            assert epoch.some_behind, "the epoch says that somebody is behind"
        replica.founded, replica.history = source.founded, list(source.history)
        replica.standing = Standing(True, epoch.turn, epoch.done_step)
        self.behind.discard(seat)

    @action()
    def replica_wants_in(self) -> None:
        """Members see that somebody waits, end their epoch and meet."""
        for replica in self.complete():
            waiting = [r for r in self.alive.values() if r.epoch is None and r.meets_since]
            if any(r.seat.life not in replica.epoch.lives for r in waiting):
                replica.meets_since = self.clock.now

    @action()
    def calm(self) -> None:
        """Nothing happens any more: the living meet in one epoch, and train on."""
        if not self.alive:
            return
        for _ in range(40):
            self.meet(list(range(SEATS)), 7)
            for seat in range(SEATS):
                self.hand_over(seat)
            self.keepers()
            self.replica_wants_in()
            members = self.together()
            if members and len(members) == len(self.alive):
                break
        members = self.together()
        words = {s: (r.epoch and r.epoch.number, r.meets_since) for s, r in self.alive.items()}
        assert len(members) == len(self.alive), f"replicas do not come together: {words}"
        assert len(members) == len(members[0].epoch.lives)
        before = members[0].standing.turn
        self.train(1)
        assert members[0].standing.turn == before + 1

    def keepers(self) -> None:
        """Each seat's keeper starts its processes again, and says which life is gone."""
        for seat in range(SEATS):
            self.replica_comes(seat)
        for replica in self.in_epoch():
            lives = replica.epoch.lives
            if any(replica.journal.why_gone(life) is not None for life in lives):
                replica.meets_since = self.clock.now

    def check_one_decision(self, epoch: Epoch) -> None:
        stored = Epoch.decode(self.store.get(f"members/{epoch.number}"))
        assert stored == epoch, "two replicas act on two decisions"
        assert len(set(epoch.lives)) == len(epoch.lives)
        assert len({life.seat for life in epoch.lives}) == len(epoch.lives), "one life of a seat"

    def check(self) -> None:
        """See the head of the file."""
        ready = [r for r in self.alive.values() if r.standing.ready and r.epoch is not None]
        for replica in ready:
            assert [turn for turn, _ in replica.history] == list(
                range(1, replica.standing.turn + 1)
            ), "a step is missing, or there twice"
        for first, second in combinations(ready, 2):
            if first.founded == second.founded:
                short, long = sorted((first.history, second.history), key=len)
                assert long[: len(short)] == short, "histories differ"
