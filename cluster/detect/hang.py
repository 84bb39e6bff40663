"""When a collective does not end: who is in which one, and who is in none.

A rank that waits in vain knows only that it waits. So every rank has a thread that looks at the
job's store now and then; when one calls, the others say there where they are, those too that are
stuck outside any collective, and the caller puts it into one line.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from parallel import Watch

_POLL_SECONDS = 5.0
_HOUSE = Path(__file__).resolve().parents[2]
_SHOWN = 6


class RollCall:
    """One rank's part in it.

    Args:
        store: of the job; a prefix of it that nobody else uses.
        rank: this one.
        world: how many there are.
        watch: what this rank's collectives go through.
        poll_seconds: how often the store is looked at.
    """

    def __init__(
        self, store: Store, rank: int, world: int, watch: Watch, poll_seconds: float
    ) -> None:
        self.store, self.rank, self.world, self.watch = store, rank, world, watch
        self.poll_seconds = poll_seconds
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="roll-call", daemon=True)
        self._thread.start()

    @staticmethod
    def start(rank: int, world: int, watch: Watch, timeout_seconds: float) -> RollCall | None:
        """Over the default group's store; None where a rank is alone."""
        if world == 1:
            return None
        # A connection of its own: the thread must not wait for what the main one waits for.
        default: Any = distributed_c10d._get_default_store()
        store = PrefixStore("roll-call", default.clone())
        store.set_timeout(timedelta(seconds=_POLL_SECONDS))
        return RollCall(store, rank, world, watch, min(_POLL_SECONDS, timeout_seconds / 10))

    def is_lost(self, error: RuntimeError) -> bool:
        """Whether an error is of a collective."""
        return (
            self.watch.waiting
            or isinstance(error, dist.DistError)
            or any(word in str(error) for word in ("gloo", "NCCL"))
        )

    def call(self, error: RuntimeError) -> str | None:
        """Ask all ranks where they are; the answer in a line, or None where another rank has asked
        before: it tells."""
        what = self.watch.describe()
        where = f"{what} failed" if self.watch.waiting else f"a collective after {what} failed"
        mine = f"rank {self.rank}: {where} ({_first_line(error)})"
        try:
            if self.store.add("called", 1) > 1:
                waits = self._where_waiting() if self.watch.waiting else f"failed too, after {what}"
                self.store.set(str(self.rank), waits)
                return None
            # Twice as long as anybody looks away, and what it takes to answer.
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
            return f"{mine}; the store of the job is gone, and with it the rank that has it"
        return f"{mine}; {self._told(answers, others)}"

    def _told(self, answers: Mapping[int, str], others: list[int]) -> str:
        same = self._where_waiting()
        by_place: dict[str, list[int]] = {}
        for rank in others:
            place = answers.get(rank, "no answer: ended, or its host is gone")
            if place != same:
                by_place.setdefault(place, []).append(rank)
        if not by_place:
            return "all others wait in it too"
        places = sorted(by_place.items(), key=lambda item: (len(item[1]), item[1]))
        told = [f"{_ranks(ranks)}: {place}" for place, ranks in places[:_SHOWN]]
        if len(places) > _SHOWN:
            told.append(f"and {len(places) - _SHOWN} other places")
        return "; ".join(told)

    def _where_waiting(self) -> str:
        return f"waits in {self.watch.describe()}"

    def _where(self) -> str:
        if self.watch.waiting:
            return self._where_waiting()
        return f"at {_line_of(self._main)}, after {self.watch.describe()}"

    def _listen(self) -> None:
        try:
            while not self._over.wait(self.poll_seconds):
                if self.store.check(["called"]):
                    self.store.set(str(self.rank), self._where())
                    return
        except RuntimeError:
            return  # the store is gone: whoever calls finds that out

    def close(self) -> None:
        """Answer no more."""
        self._over.set()
        self._thread.join()


def _line_of(thread: int) -> str:
    """Where a thread is: its innermost line in this house, or its innermost one."""
    frame = inner = sys._current_frames().get(thread)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_HOUSE) and "site-packages" not in path.parts:
            return f"{path.relative_to(_HOUSE)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    if inner is None:
        return "its end"
    return f"{Path(inner.f_code.co_filename).name}:{inner.f_lineno}"


def _first_line(error: RuntimeError) -> str:
    """Without where in the library it was thrown, and its advice."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).strip()).split("\n")[0].split(". ")[0]


def _ranks(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 0-3, 7``."""
    parts: list[str] = []
    start = previous = ranks[0]
    for rank in [*ranks[1:], -1]:
        if rank != previous + 1:
            parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = rank
        previous = rank
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
