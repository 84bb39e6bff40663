"""Hang reports: which rank is in which collective, when a collective fails or times out.

A rank whose collective times out does not know which rank is missing. So every rank has a thread
that polls the job's store. When one rank asks for a report, the threads of all other ranks write
their rank's place to the store, also where the rank is stuck outside any collective. The rank that
asked puts the places into one line.

After a report no rank can go on. A rank that has not ended some seconds later is stuck, and its
thread ends the process with exit code 1: torchrun would otherwise wait for the process before a new
start.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

# Public, documented names that torch.distributed does not mark as exported for type checkers.
from torch.distributed import PrefixStore, Store, distributed_c10d  # type: ignore[attr-defined]

from parallel import CommMonitor
from parallel.layout import name_ranks

_POLL_SECONDS = 0.5
_POLLS_PER_SECOND = 2000
"""Of all ranks together: more would be a load on the store."""
_CONNECT_SECONDS = 5.0
_GRACE_SECONDS = 10.0
"""As long as a rank may take to end after a report."""
_PROJECT = Path(__file__).resolve().parents[2]
_MOST_PLACES = 6
"""Places in a report line; a line stays readable on thousands of ranks."""


def open_store(prefix: str) -> Store:
    """Another connection to the store of the default process group, under a prefix of its own.

    The main thread may block the first connection in a wait.
    """
    default: Any = distributed_c10d._get_default_store()
    with suppress(RuntimeError, NotImplementedError):  # a store in this process has no connection
        default = default.clone()
    store = PrefixStore(prefix, default)
    store.set_timeout(timedelta(seconds=_CONNECT_SECONDS))
    return store


def is_of_collective(error: RuntimeError) -> bool:
    """Whether an error says that it comes from a collective."""
    return isinstance(error, dist.DistError) or any(w in str(error) for w in ("gloo", "NCCL"))


class HangReport:
    """Makes this rank's report, and answers reports of other ranks from a thread.

    Args:
        store: a store of all ranks, under a prefix that nothing else uses.
        rank: this rank.
        world: the number of ranks.
        monitor: the monitor of this rank's collectives.
        poll_seconds: seconds between two looks at the store.
    """

    def __init__(
        self, store: Store, rank: int, *, world: int, monitor: CommMonitor, poll_seconds: float
    ) -> None:
        self.store, self.rank, self.world, self.monitor = store, rank, world, monitor
        self.poll_seconds = poll_seconds
        self.before_answer: Callable[[], None] | None = None
        """Called once, on any thread, before this rank reports or answers another rank's report."""
        self._prepared = False
        self._preparing = threading.Lock()
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="hang-report", daemon=True)
        self._thread.start()

    @staticmethod
    def start(
        rank: int, world: int, *, monitor: CommMonitor, timeout_seconds: float
    ) -> HangReport | None:
        """Start the thread, with the default process group's store; None for one rank."""
        if world == 1:
            return None
        store = open_store("hang-report")
        poll_seconds = max(_POLL_SECONDS, world / _POLLS_PER_SECOND)
        poll_seconds = min(poll_seconds, timeout_seconds / 10)
        return HangReport(store, rank, world=world, monitor=monitor, poll_seconds=poll_seconds)

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether ``error`` comes from a collective."""
        return self.monitor.waiting or is_of_collective(error)

    def report(self, error: RuntimeError) -> str | None:
        """One line for people: this rank's collective and ``error``, and where other ranks are.

        None where another rank reports already.
        """
        self._prepare()
        what = self.monitor.describe()
        where = f"{what} failed" if self.monitor.waiting else f"a collective after {what} failed"
        mine = f"rank {self.rank}: {where} ({_first_line(error)})"
        try:
            if self.store.add("requested", 1) > 1:
                place = self._waits() if self.monitor.waiting else f"failed too, after {what}"
                self.store.set(str(self.rank), place)
                return None
            # Two polls of the slowest thread, and a second for the answer.
            until = time.monotonic() + 2 * self.poll_seconds + 1
            others = [rank for rank in range(self.world) if rank != self.rank]
            while time.monotonic() < until and not self.store.check([str(r) for r in others]):
                time.sleep(0.05)
            answers = {
                rank: self.store.get(str(rank)).decode()
                for rank in others
                if self.store.check([str(rank)])
            }
        except RuntimeError:
            return (
                f"{mine}; the job's store does not answer: the rank that serves the store is lost"
            )
        return f"{mine}; {self._places(answers, others)}"

    def _places(self, answers: Mapping[int, str], others: list[int]) -> str:
        same = self._waits()
        by_place: dict[str, list[int]] = {}
        for rank in others:
            place = answers.get(rank, "no answer: the process has ended or its host is lost")
            if place != same:
                by_place.setdefault(place, []).append(rank)
        if not by_place:
            return "all other ranks wait in this collective too"
        places = sorted(by_place.items(), key=lambda item: (len(item[1]), item[1]))
        shown = [f"{name_ranks(ranks)}: {place}" for place, ranks in places[:_MOST_PLACES]]
        if len(places) > _MOST_PLACES:
            shown.append(f"and {len(places) - _MOST_PLACES} other places")
        return "; ".join(shown)

    def _waits(self) -> str:
        return f"waits in {self.monitor.describe()}"

    def _place(self) -> str:
        if self.monitor.waiting:
            return self._waits()
        return f"at {line_of(self._main)}, after {self.monitor.describe()}"

    def _listen(self) -> None:
        try:
            while not self._over.wait(self.poll_seconds):
                if self.store.check(["requested"]):
                    self._prepare()
                    self.store.set(str(self.rank), self._place())
                    break
            else:
                return
        except RuntimeError:
            return  # the store does not answer; report() says so
        if not self._over.wait(_GRACE_SECONDS):
            os._exit(1)  # the main thread is stuck, and cannot be asked

    def _prepare(self) -> None:
        with self._preparing:
            if self.before_answer is not None and not self._prepared:
                self._prepared = True
                self.before_answer()

    def close(self) -> None:
        """Stop the thread; this rank answers no more reports."""
        self._over.set()
        self._thread.join()


def line_of(thread: int) -> str:
    """The innermost source line of a thread in this project, or else its innermost line."""
    frame = inner = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PROJECT) and "site-packages" not in path.parts:
            return f"{path.relative_to(_PROJECT)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    if inner is None:
        return "the end of its main thread"
    return f"{Path(inner.f_code.co_filename).name}:{inner.f_lineno}"


def _first_line(error: RuntimeError) -> str:
    """The first sentence of an error, without the place in torch's source and the advice."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).split("\n")[0].split(". ")[0]
