"""Epochs: which replicas of a run are there, agreed on through the launch's store.

A run with replicas goes on without a replica that breaks, and takes the replica in again when it
comes back. Between two such changes lies an epoch. A replica has a seat, a number that it keeps for
the launch; the processes in the seat have a start, which counts how often they were started. Seat
and start are a life. A life that is gone never comes back.

The store has

- ``gone/LIFE``: why a life is gone. Its first writer stands.
- ``waiting/SEAT``: the start that is ready to be taken in.
- ``here/NUMBER/LIFE``: what a replica says at the meeting that follows epoch NUMBER.
- ``members/NUMBER``: the members of an epoch. Its first writer stands, so that every replica that
  reads the key acts on one decision, whoever made it.
- ``journal/I``: each change, in order, for those who wait for a change.
- ``end``: the exit code of the run.

:func:`decide` is the whole rule; ``tests/cluster/test_epochs_model.py`` explores it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

# A public, documented name that torch.distributed does not mark as exported for type checkers.
from torch.distributed import Store  # type: ignore[attr-defined]

_HOLE_SECONDS = 2.0
"""After which a number of the journal counts as never written: its writer has died."""


class Life(NamedTuple):
    """The processes of one start in one seat."""

    seat: int
    start: int

    @property
    def key(self) -> str:
        """As the store's keys have a life."""
        return f"{self.seat}.{self.start}"


@dataclass(frozen=True)
class Word:
    """What a replica says at a meeting."""

    ready: bool
    """Whether all its ranks have the run's state."""
    turn: int = 0
    """The most step barriers that one of its ranks has passed."""
    least_turn: int = 0
    """The fewest."""
    done_step: int = 0
    """The last step after which all its ranks did what is due between steps."""


@dataclass(frozen=True)
class Epoch:
    """The members of an epoch, and what they begin with."""

    number: int
    lives: tuple[Life, ...]
    """In the order of their numbers in ``dp_replicate``."""
    source: int | None
    """The number of a replica that has the run's newest state; None: the newest checkpoint has it.
    """
    turn: int = 0
    """The barriers that the run has passed."""
    some_behind: bool = False
    """Whether a rank with the run's state has not passed the last of these barriers."""
    done_step: int = 0
    """The last step after which every rank did what is due between steps."""
    joined: tuple[Life, ...] = ()
    """The lives that get the run's state."""
    left: tuple[tuple[Life, str], ...] = ()
    """The members of the epoch before that are gone, and why."""

    def encode(self) -> str:
        """As the store has the epoch."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str | bytes) -> Epoch:
        """From what :meth:`encode` returned."""
        values: dict[str, Any] = json.loads(text)
        values["lives"] = tuple(Life(*pair) for pair in values["lives"])
        values["joined"] = tuple(Life(*pair) for pair in values["joined"])
        values["left"] = tuple((Life(*life), why) for life, why in values["left"])
        return Epoch(**values)


def renumber(before: Sequence[Life], stay: Sequence[Life], joined: Sequence[Life]) -> list[Life]:
    """The members of the next epoch by number: as many as possible keep theirs.

    Those with the highest numbers take the numbers that are left free, then those who come.
    """
    count = len(stay) + len(joined)
    places: list[Life | None] = [life if life in stay else None for life in before][:count]
    places += [None] * (count - len(places))
    moved = [life for life in reversed(before) if life in stay and life not in places]
    rest = iter([*moved, *joined])
    return [next(rest) if life is None else life for life in places]


def decide(
    before: Epoch | None,
    words: Mapping[Life, Word],
    gone: Mapping[Life, str],
    waiting: Sequence[Life],
    seats: int | None = None,
) -> Epoch | None:
    """The next epoch; None where somebody must still be waited for. A pure function.

    Members that have the run's state go on with it. They take in who waits. Where no member has the
    state, those who wait found an epoch with the newest checkpoint, once all ``seats`` wait.

    Args:
        before: the epoch that is over; None before the first.
        words: what its members have said at the meeting.
        gone: the lives that are gone.
        waiting: the lives that are ready to be taken in.
        seats: the replicas that found an epoch; None: those who wait.
    """
    number = 1 if before is None else before.number + 1
    lives = () if before is None else before.lives
    stay = [life for life in lives if life not in gone]
    if any(life not in words for life in stay):
        return None
    joined = [life for life in waiting if life not in gone and life not in stay]
    ready = [life for life in stay if words[life].ready]
    left = tuple((life, gone[life]) for life in lives if life in gone)
    if not ready:
        # A member without the state was to get it from one that is gone: it must start again.
        if stay or not joined or len(joined) < (1 if seats is None else seats):
            return None
        founders = tuple(sorted(joined))
        return Epoch(number, founders, source=None, joined=founders, left=left)
    joined = [*(life for life in stay if life not in ready), *joined]
    members = tuple(renumber(lives, ready, joined))
    turn = max(words[life].turn for life in ready)
    ahead = [life for life in members if life in ready and words[life].turn == turn]
    return Epoch(
        number,
        members,
        source=members.index(ahead[0]),
        turn=turn,
        some_behind=any(words[life].least_turn < turn for life in ready),
        done_step=min(words[life].done_step for life in ready),
        joined=tuple(joined),
        left=left,
    )


class Journal:
    """The changes that a launch's store has, in order.

    Args:
        store: under a prefix of the launch's own.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def write(self, **entry: Any) -> None:
        """Append a change."""
        number = self.store.add("journal", 1)
        self.store.set(f"journal/{number}", json.dumps(entry))

    def declare_gone(self, life: Life, why: str) -> None:
        """Say that a life is gone; where somebody has said so already, nothing changes."""
        text = json.dumps([why, life.key])
        if self.store.compare_set(f"gone/{life.key}", "", text).decode() == text:
            self.write(gone=list(life), why=why)

    def why_gone(self, life: Life) -> str | None:
        """Why a life is gone; None while it is there."""
        key = f"gone/{life.key}"
        return json.loads(self.store.get(key))[0] if self.store.check([key]) else None

    def end(self, code: int) -> None:
        """Say that the run has ended."""
        self.store.compare_set("end", "", str(code))

    def end_code(self) -> int | None:
        """The exit code of the run; None while it lasts."""
        return int(self.store.get("end")) if self.store.check(["end"]) else None


class JournalWatch:
    """Follows the journal from a thread, until :meth:`close`.

    Args:
        store: a connection of its own: the thread blocks it.
        seen: called with each change that comes from now on, on the thread.
        lost: called once, where the store does not answer any more.
        pause: seconds between two looks at the store.
    """

    def __init__(
        self,
        store: Store,
        seen: Callable[[dict[str, Any]], None],
        lost: Callable[[str], None],
        pause: float,
    ) -> None:
        self._store, self._seen, self._lost, self._pause = store, seen, lost, pause
        self._next = store.add("journal", 0) + 1
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        since = time.monotonic()
        while not self._closed:
            try:
                entry = self._look()
            except RuntimeError as error:
                if not self._closed:
                    self._lost(f"the launch's store does not answer: {error}")
                return
            now = time.monotonic()
            if entry is not None:
                self._next, since = self._next + 1, now
                self._seen(entry)
            elif now - since > _HOLE_SECONDS:
                with suppress(RuntimeError):  # the next look tells of a lost store
                    self._next += self._store.add("journal", 0) > self._next
                since = now
            else:
                time.sleep(self._pause)

    def _look(self) -> dict[str, Any] | None:
        """The next change, where there is one."""
        key = f"journal/{self._next}"
        if not self._store.check([key]):
            return None
        entry: dict[str, Any] = json.loads(self._store.get(key))
        return entry

    def close(self) -> None:
        """Let the thread end with its present wait."""
        self._closed = True
