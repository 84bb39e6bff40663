"""A rank's side of the epochs: its replica in the run, from one meeting to the next.

Within a replica one rank, the first, speaks to the store; the other ranks learn the decision from
it. So the store has one client for each replica in a meeting, and not one for each rank.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# Public, documented names that torch.distributed does not mark as exported for type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from cluster.members import Epoch, Journal, JournalWatch, Life, Word, decide
from parallel import Topology
from parallel.crossing import Crossing, RegroupError, across, install_crossing
from pretrain.errors import EXIT_LOST

_PAUSE = 0.005
_WORD_SECONDS = 2.0
"""After which a failed collective is not due to a rank that has ended."""
_LOOKS_PER_SECOND = 20_000
"""Of all ranks together, at the launch's store."""
_GOES_ON, _MEETS = 0, 1
_FOUNDING_SECONDS = 60.0
"""After which replicas found an epoch without those that have not come."""


@dataclass(frozen=True)
class Seat:
    """Where a process stands in a launch whose replicas come and leave."""

    life: Life
    replicas: int
    """The seats of the launch."""
    prefix: str
    """Of the launch's keys in the store that MASTER_ADDR and MASTER_PORT name."""

    def connect(self) -> Store:
        """A new connection to the launch's store."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
        return PrefixStore(self.prefix, store)


@dataclass
class Standing:
    """What a rank brings to a meeting."""

    ready: bool = False
    """Whether this rank has the run's state."""
    turn: int = 0
    """The step barriers that this rank has passed."""
    done_step: int = 0
    """The last step after which this rank did what is due between steps."""


@dataclass
class _Known:
    """What the journal has said so far."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    gone: dict[Life, str] = field(default_factory=dict)
    waiting: dict[int, Life] = field(default_factory=dict)


class Membership:
    """This rank's replica in the run's epochs.

    Args:
        seat: of this process.
        topology: of the launch, with all its replicas.
        rank: as the launcher numbers this process, which is its rank in ``topology``.
        device: of the run's tensors.
        timeout: of collectives, and of a meeting.
    """

    def __init__(
        self, seat: Seat, topology: Topology, rank: int, *, device: torch.device, timeout: timedelta
    ) -> None:
        self.seat, self.full, self.timeout = seat, topology, timeout
        pp, inner = topology.place(rank).pp, topology.fsdp_tp
        self.index = pp * inner + rank % inner
        """This rank's place in its replica."""
        self.ranks = topology.world // topology.dp_replicate
        """The ranks of a replica."""
        self.store = seat.connect()
        self.journal = Journal(self.store)
        self.epoch: Epoch | None = None
        self.standing = Standing()
        self.crossing = Crossing(device, timeout)
        self.patience = timeout.total_seconds() / 4
        """As long as the members of an epoch may take to come to a meeting."""
        self._known = _Known()
        self._members: tuple[Life, ...] = ()
        self._talk: Any = None
        """Of this replica's ranks, for meetings and gates alone."""
        self._watch = JournalWatch(
            seat.connect(),
            self._see,
            self._lose,
            max(4 * _PAUSE, topology.world / _LOOKS_PER_SECOND),
        )
        install_crossing(self.crossing)

    def join_replica(self, backend: str) -> None:
        """Make the default process group, of this replica's ranks."""
        store = PrefixStore(f"replica/{self.seat.life.key}", self.store)
        dist.init_process_group(
            backend, store=store, rank=self.index, world_size=self.ranks, timeout=self.timeout
        )
        if self.ranks > 1:
            self._talk = dist.new_group(backend="gloo", timeout=self.timeout)
            self.crossing.gate = self._gate

    @property
    def wants_meeting(self) -> bool:
        """Whether a replica waits to be taken in."""
        with self._known.lock:
            return any(life not in self._known.gone for life in self._known.waiting.values())

    def next(self) -> Epoch:
        """Meet, and make the groups of the next epoch, until there is one with all its members.

        Raises SystemExit where this replica is not among its members, or where the run has ended.
        """
        while True:
            try:
                epoch = self._meet()
            except RuntimeError as error:  # of a rank of this replica, or of the store
                self.leave(f"{error}".splitlines()[0])
            if self.seat.life not in epoch.lives:
                self.leave("it is not among the members of the next epoch")
            self._begin(epoch)
            number = epoch.lives.index(self.seat.life)
            topology = self.topology
            try:
                self.crossing.regroup(
                    self.epoch_store("groups"),
                    self.rank_of(number, self.index),
                    topology.world,
                    index=self.index,
                    column=(number, len(epoch.lives)),
                )
                return epoch
            except RuntimeError as error:
                self.over(error)

    def over(self, error: BaseException) -> None:
        """A collective of this rank has failed, and so the epoch is over.

        As a rule the store says soon which member is gone. Otherwise a rank hangs: this rank ends
        the epoch for all, and whoever does not come to the meeting is gone.
        """
        until = time.monotonic() + _WORD_SECONDS
        while self.crossing.why is None and time.monotonic() < until:
            time.sleep(_PAUSE)
        if self.crossing.why is None:
            assert self.epoch is not None
            why = f"rank {self.rank}: {error}".splitlines()[0]
            with suppress(RuntimeError):  # the launch's store may be gone
                self.journal.write(over=self.epoch.number, why=why)
            self.crossing.interrupt(why)

    def lose(self, ranks: Sequence[int], why: str) -> None:
        """Go on without the replicas of some ranks of this epoch; any thread may call."""
        assert self.epoch is not None
        for number in sorted({self.topology.place(rank).dp_replicate for rank in ranks}):
            self.journal.declare_gone(self.epoch.lives[number], why)

    def leave(self, why: str) -> NoReturn:
        """End this process: its replica starts again."""
        with suppress(RuntimeError):  # the launch's store may be gone
            self.journal.declare_gone(self.seat.life, why)
        raise SystemExit(EXIT_LOST)

    @property
    def topology(self) -> Topology:
        """Of the present epoch."""
        assert self.epoch is not None
        degrees = self.full.as_dict() | {"dp_replicate": len(self.epoch.lives)}
        return Topology(**degrees)

    @property
    def rank(self) -> int:
        """This rank in the present epoch."""
        assert self.epoch is not None
        return self.rank_of(self.epoch.lives.index(self.seat.life), self.index)

    @property
    def speaks_for_source(self) -> bool:
        """Whether this is the first rank of the replica that has the run's newest state."""
        epoch = self.epoch
        if epoch is None or epoch.source is None or self.index:
            return False
        return epoch.lives[epoch.source] == self.seat.life

    def rank_of(self, number: int, index: int) -> int:
        """The rank at ``index`` of a replica, in the present epoch."""
        assert self.epoch is not None
        pp, inner = divmod(index, self.full.fsdp_tp)
        return (pp * len(self.epoch.lives) + number) * self.full.fsdp_tp + inner

    def epoch_store(self, name: str) -> Store:
        """Keys of the present epoch alone, over a connection of their own."""
        assert self.epoch is not None
        return PrefixStore(f"epoch/{self.epoch.number}/{name}", self.seat.connect())

    def close(self) -> None:
        """Follow the journal no more."""
        self._watch.close()
        install_crossing(None)

    def _begin(self, epoch: Epoch) -> None:
        self.epoch = epoch
        if self.index == 0:
            self.store.set(f"joined/{self.seat.life.key}", "")
        with self._known.lock:
            self._members = epoch.lives
        self.crossing.begin()
        with self._known.lock:
            for life in epoch.lives:
                if self._known.waiting.get(life.seat) == life:
                    del self._known.waiting[life.seat]
            gone = [life for life in epoch.lives if life in self._known.gone]
        for life in gone:
            self.crossing.interrupt(self._known.gone[life])

    def _see(self, entry: Mapping[str, Any]) -> None:
        """A change that the journal has."""
        with self._known.lock:
            if "gone" in entry:
                life = Life(*entry["gone"])
                self._known.gone[life] = entry["why"]
                interrupts = life in self._members
            else:
                interrupts = False
            if "over" in entry:
                interrupts = self.epoch is not None and entry["over"] == self.epoch.number
            if "waiting" in entry:
                life = Life(*entry["waiting"])
                if life not in self._members:
                    self._known.waiting[life.seat] = life
        if interrupts:
            self.crossing.interrupt(entry["why"])

    def _lose(self, why: str) -> None:
        """Without the launch's store nobody can meet: the run starts again."""
        self.crossing.interrupt(why)

    def _meet(self) -> Epoch:
        """The next epoch, on every rank of this replica."""
        s = self.standing
        own, rows = [int(s.ready), s.turn, s.done_step, _MEETS], list[list[int]]()
        while not rows or any(row[3] != _MEETS for row in rows):
            rows = self._gather(own)  # again for those that were at a gate, and come now
        turns = [row[1] for row in rows]
        word = Word(
            ready=all(row[0] for row in rows),
            turn=max(turns),
            least_turn=min(turns),
            done_step=min(row[2] for row in rows),
        )
        text = ""
        if self.index == 0:
            epoch = self._speak(word)
            text = str(epoch) if isinstance(epoch, int) else epoch.encode()
        text = self._tell(text)
        if text.isdecimal():
            raise SystemExit(int(text))
        return Epoch.decode(text)

    def _speak(self, word: Word) -> Epoch | int:
        """The first rank's part of a meeting; the exit code of the run where it has ended."""
        life, number = self.seat.life, 0 if self.epoch is None else self.epoch.number
        if self.epoch is not None and word.ready:
            self.store.set(f"here/{number}/{life.key}", json.dumps(list(vars(word).values())))
        elif self.epoch is not None:
            self.journal.declare_gone(life, "it did not get the run's state")
            return EXIT_LOST
        else:
            number = self._newest()
            self.store.set(f"waiting/{life.seat}", str(life.start))
            self.journal.write(waiting=list(life))
        began = time.monotonic()
        while True:
            code = self.journal.end_code()
            if code is not None:
                return code
            key = f"members/{number + 1}"
            if self.store.check([key]):
                epoch = Epoch.decode(self.store.get(key))
                if self.epoch is not None or life in epoch.lives:
                    return epoch
                number += 1
                continue
            proposal = self._proposal(number, time.monotonic() - began)
            if proposal is not None:
                self.store.compare_set(key, "", proposal.encode())
                self.store.compare_set("newest", self._newest_text(), str(number + 1))
                continue
            time.sleep(_PAUSE if self.epoch is not None else 4 * _PAUSE)

    def _newest_text(self) -> str:
        return self.store.get("newest").decode() if self.store.check(["newest"]) else ""

    def _newest(self) -> int:
        """The number of the newest epoch that is decided; 0 before the first."""
        number = int(self._newest_text() or 0)
        while self.store.check([f"members/{number + 1}"]):
            number += 1
        return number

    def _proposal(self, number: int, waited: float) -> Epoch | None:
        """What this replica would decide of the epoch after ``number``."""
        before = Epoch.decode(self.store.get(f"members/{number}")) if number else None
        gone: dict[Life, str] = {}
        words: dict[Life, Word] = {}
        for life in () if before is None else before.lives:
            why = self.journal.why_gone(life)
            key = f"here/{number}/{life.key}"
            if why is not None:
                gone[life] = why
            elif self.store.check([key]):
                words[life] = Word(*json.loads(self.store.get(key)))
            elif waited > self.patience and self.epoch is not None:
                self.journal.declare_gone(life, "it did not come to the meeting")
        if self.epoch is None and before is not None and len(gone) < len(before.lives):
            return None  # its members decide
        waiting = []
        for seat in range(self.seat.replicas):
            if self.store.check([f"waiting/{seat}"]):
                life = Life(seat, int(self.store.get(f"waiting/{seat}")))
                if (why := self.journal.why_gone(life)) is None:
                    waiting.append(life)
                else:
                    gone[life] = why
        seats = self.seat.replicas if waited < _FOUNDING_SECONDS else None
        waiting = [life for life in waiting if before is None or life not in before.lives]
        return decide(before, words, gone, waiting, seats)

    def _gate(self) -> None:
        if any(row[3] == _MEETS for row in self._gather([0, 0, 0, _GOES_ON])):
            raise RegroupError(self.crossing.why or "the epoch is over for a rank of this replica")

    def _gather(self, row: list[int]) -> list[list[int]]:
        own = torch.tensor(row)
        rows = [torch.empty_like(own) for _ in range(self.ranks)]
        if self.ranks == 1:
            return [row]
        dist.all_gather(rows, own, group=self._talk)
        return [row.tolist() for row in rows]

    def _tell(self, text: str) -> str:
        """The first rank's text, on every rank of this replica."""
        return text if self.ranks == 1 else broadcast_text(text, self._talk, 0)


def broadcast_text(text: str, group: dist.ProcessGroup, source: int) -> str:
    """The text of rank ``source`` of a group, on every rank of the group."""

    def broadcast(sent: torch.Tensor) -> None:
        begin = partial(dist.broadcast, sent, group=group, group_src=source, async_op=True)
        across(group, begin).wait()

    data = torch.tensor(list(text.encode()), dtype=torch.uint8)
    size = torch.tensor([len(data)])
    broadcast(size)
    sent = data if group.rank() == source else torch.zeros(int(size), dtype=torch.uint8)
    broadcast(sent)
    return bytes(sent.tolist()).decode()
