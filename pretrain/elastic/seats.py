"""Seats: the process of each rank that stays, while replicas of the model leave and come back.

The process that torchrun starts for a rank imports what training needs and forks, as a warm restart
does (:mod:`pretrain.elastic.warm`). The child trains. When a child ends by an error or a signal,
the parents of the ranks of this replica end their children and fork again. No other replica's
process is touched: they go on without the replica, and take it in when it is there again
(:mod:`pretrain.elastic.membership`). torchrun notices nothing.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

# A public, documented name that torch.distributed does not mark as exported for type checkers.
from torch.distributed import Store  # type: ignore[attr-defined]

from cluster.members import Journal, Life
from parallel import Topology
from pretrain.elastic.membership import Seat
from pretrain.elastic.warm import FINAL, POLL_SECONDS, WarmRank
from pretrain.errors import EXIT_BAD_INPUT, EXIT_HEALTH, EXIT_LOST
from pretrain.observe import say

_STOPPED_SECONDS = 0.5
"""After which a child that stands still by a signal counts as lost."""


class SeatKeeper(WarmRank):
    """The parent of one rank's processes in a run whose replicas leave and come back.

    Args:
        torchrun: the process id of torchrun.
        exclude_list: the run's exclude list.
        join: as long as parents wait for each other before the first start.
        topology: of the launch.
    """

    def __init__(
        self, torchrun: int, exclude_list: Path, *, join: timedelta, topology: Topology
    ) -> None:
        super().__init__(torchrun, exclude_list, join=join)
        self.replicas = topology.dp_replicate
        self.number = topology.place(self.rank).dp_replicate
        self.team = [
            rank
            for rank in range(topology.world)
            if topology.place(rank).dp_replicate == self.number
        ]
        """The ranks of this replica."""
        self.seat: Seat | None = None
        """In a child: where the child stands."""
        self._stopped_at: float | None = None

    def run(self) -> int | None:
        """Fork children until one ends for good; None in a child, in parents the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self.forward)
        try:
            store = self.connect()
            journal = Journal(store)
            code = self._keep(store, journal)
            if code is None:
                return None
            self.wait_for_others(store, "run")
            return code
        except RuntimeError:  # of the store: the first parent is gone
            self.end_child()
        finally:
            if self.seat is None:
                self.end_servers()
        return EXIT_LOST

    def _keep(self, store: Store, journal: Journal) -> int | None:
        for start in range(self.restarts + 1):
            life = Life(self.number, start)
            code = self._wait_for_team(store, journal, life)
            if code is not None:
                return code
            if self.has_new_exclusions:
                return EXIT_LOST  # torchrun starts the ranks anew, without the machines
            if self.fork():
                self.seat = Seat(life, self.replicas, self.prefix)
                return None
            code = self._watch_life(journal, life)
            if self.stops or (code in FINAL and not self._others_go_on(store, life, code)):
                if code in FINAL:
                    journal.end(code)
                return code if code >= 0 else 128 - code
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            journal.declare_gone(life, f"rank {self.rank} ended by {how}")
        say(f"the processes of rank {self.rank} have failed {self.restarts + 1} times; the run "
            f"goes on without this replica")  # fmt: skip
        while (code := journal.end_code()) is None and not self.stops:
            time.sleep(self.pause)
        return EXIT_LOST if code is None else code

    @staticmethod
    def _others_go_on(store: Store, life: Life, code: int) -> bool:
        """Whether a life that ended with an error was no member of the run yet, which goes on."""
        return (
            code in (EXIT_BAD_INPUT, EXIT_HEALTH)
            and store.check(["members/1"])
            and not store.check([f"joined/{life.key}"])
        )

    def _wait_for_team(self, store: Store, journal: Journal, life: Life) -> int | None:
        """Wait for the parents of the replica's other ranks; the run's exit code where it ends
        before they have come."""
        key = f"team/{life.key}"
        store.add(key, 1)
        while store.add(key, 0) < len(self.team):
            if self.stops or os.getppid() != self.torchrun:
                return EXIT_LOST
            if (code := journal.end_code()) is not None:
                return code
            time.sleep(self.pause)
        return None

    def _watch_life(self, journal: Journal, life: Life) -> int:
        """Wait until this rank's child has ended, or the life is gone."""
        next_question = time.monotonic()
        self._stopped_at = None
        while True:
            code = self.exit_code()
            if code is not None:
                return code
            now = time.monotonic()
            if os.getppid() != self.torchrun and self.ends_with_torchrun(now):
                return self.end_child()
            if self._stands_still(now):
                journal.declare_gone(life, f"rank {self.rank} was stopped by a signal")
                return self.end_child()
            if now >= next_question and not self.stops:
                next_question = now + self.pause
                if journal.why_gone(life) is not None:
                    return self.end_child()
            time.sleep(POLL_SECONDS)

    def _stands_still(self, now: float) -> bool:
        """Whether the child has stood still for long, as after SIGSTOP."""
        if not self.child_is_stopped():
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        return self._stopped_at is not None and now - self._stopped_at > _STOPPED_SECONDS
