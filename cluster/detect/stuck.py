"""The watch over all heartbeats: which ranks are stuck, and which publish no heartbeat any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from torch.distributed import Store  # type: ignore[attr-defined]

from cluster.detect.devices import DeviceReport
from cluster.detect.heartbeat import Pulse
from parallel.layout import name_ranks

_READ_AT_ONCE = 1000
_UNKNOWN_AT_ONCE = 100
_GRACE_SECONDS = 10.0
"""Time that a run has to end by itself after its stuck ranks were ended."""


@dataclass(frozen=True)
class StuckRanks:
    """Ranks that have stood still at one place for longer than their history lets expect."""

    ranks: tuple[int, ...]
    phase: str
    step: int
    """Committed steps."""
    seconds: float
    """Of the rank that has stood still the longest; without a heartbeat, since the last one."""
    limit_seconds: float
    has_heartbeat: bool = True
    """False: the process is stopped, has ended, or has lost the network."""
    place: str = ""
    """The collective or the source line, for people."""

    def describe(self) -> str:
        """One line for people."""
        if not self.has_heartbeat:
            return (
                f"no heartbeat from {name_ranks(self.ranks)} for {self.seconds:.0f} s, last in "
                f"{self.phase} after step {self.step}: the process is stopped or lost"
            )
        place = f"; {self.place}" if self.place else ""
        return (
            f"{name_ranks(self.ranks)} stuck in {self.phase} after step {self.step} for "
            f"{self.seconds:.0f} s (limit {self.limit_seconds:.0f} s){place}"
        )


def find_stuck(
    pulses: Mapping[int, Pulse], silent: Mapping[int, float], silence_limit: float
) -> list[StuckRanks]:
    """The ranks that other ranks wait for; empty where all move, or may be expected to move soon.

    A rank that waits in a collective is not stuck: another rank has not come to the collective.
    Where every rank waits in some collective, the ranks are in different ones, and each is named.
    Of ranks outside collectives, those that have moved least are named.

    Args:
        pulses: the newest heartbeat of each rank that has published.
        silent: for each rank, the seconds since its last heartbeat.
        silence_limit: from which on silence means that the process is stopped or lost.
    """
    lost = {
        rank
        for rank, seconds in silent.items()
        if seconds > silence_limit and not (rank in pulses and pulses[rank].over)
    }
    live = {rank: p for rank, p in pulses.items() if rank not in lost and not p.over}
    still = {rank for rank, p in live.items() if p.still_seconds > p.limit_seconds}
    named = lost | {rank for rank in still if not live[rank].waits_in}
    if not named and len(still) == len(live):
        named = still
    beats = [pulses[rank].beats if rank in pulses else -1 for rank in named]
    named = lost | {r for r in named - lost if pulses[r].beats == min(beats)}
    return _grouped(named, pulses, silent, lost, silence_limit)


def _grouped(
    named: set[int],
    pulses: Mapping[int, Pulse],
    silent: Mapping[int, float],
    lost: set[int],
    silence_limit: float,
) -> list[StuckRanks]:
    """One entry for all ranks at one place, small groups first."""
    groups: dict[tuple[str, int, bool, str], list[int]] = {}
    for rank in sorted(named):
        pulse = pulses.get(rank)
        if pulse is None:
            groups.setdefault(("start", 0, False, ""), []).append(rank)
            continue
        place = f"waits in {pulse.waits_in}" if pulse.waits_in else pulse.at and f"at {pulse.at}"
        alive = rank not in lost
        groups.setdefault((pulse.phase, pulse.step, alive, place if alive else ""), []).append(rank)
    found = []
    for (phase, step, alive, place), ranks in groups.items():
        seconds = max(pulses[r].still_seconds if alive else silent[r] for r in ranks)
        limit = min(pulses[r].limit_seconds for r in ranks) if alive else silence_limit
        found.append(StuckRanks(tuple(ranks), phase, step, seconds, limit, alive, place))
    return sorted(found, key=lambda each: (len(each.ranks), each.ranks))


class StuckWatch:
    """Reads the heartbeats of all ranks from a thread on rank 0, until :meth:`close`.

    Each stop of a rank is told once. A rank that moves again is told too.

    Args:
        store: see :func:`cluster.detect.hang.open_store`.
        world: the number of ranks.
        seconds: between two looks at all heartbeats.
        silence_limit: seconds without a heartbeat after which a process counts as stopped or lost.
        tell: called with ranks that are stuck, on the watch's thread.
        tell_moving: called with ranks that were told and move again, on the watch's thread.
        end: ends this process. Where given, stuck ranks are asked to end their process. A process
            that is stopped cannot: then this process ends. None lets the run stand.
        take_devices: called at each look with the newest reports of GPUs, by rank.
    """

    def __init__(
        self,
        store: Store,
        world: int,
        *,
        seconds: float,
        silence_limit: float,
        tell: Callable[[StuckRanks], None],
        tell_moving: Callable[[list[int]], None],
        end: Callable[[], None] | None = None,
        take_devices: Callable[[dict[int, DeviceReport]], None] | None = None,
    ) -> None:
        self._take_devices = take_devices
        self.store, self.world, self.seconds = store, world, seconds
        self.silence_limit, self._end = silence_limit, end
        self._tell, self._tell_moving = tell, tell_moving
        self._pulses: dict[int, Pulse] = {}
        self._fresh = dict.fromkeys(range(world), time.monotonic())
        """When each rank's newest heartbeat was read first, by this process's clock."""
        self._told: dict[int, Pulse | None] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stuck-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self.seconds):
            # A store that does not answer says nothing of other ranks.
            with suppress(RuntimeError):
                self._read()
                if self._take_devices is not None:
                    known = {r: p.device for r, p in self._pulses.items() if p.device is not None}
                    self._take_devices(known)
                if self._look() and self._end is not None:
                    self._end_run(self._end)

    def _read(self) -> None:
        known = sorted(self._pulses)
        for start in range(0, len(known), _READ_AT_ONCE):
            ranks = known[start : start + _READ_AT_ONCE]
            for rank, text in zip(ranks, self.store.multi_get(list(map(str, ranks))), strict=True):
                self._take(rank, text)
        unknown = [rank for rank in range(self.world) if rank not in self._pulses]
        for rank in unknown[:_UNKNOWN_AT_ONCE]:
            if self.store.check([str(rank)]):
                self._take(rank, self.store.get(str(rank)))
        for rank in unknown[_UNKNOWN_AT_ONCE:]:
            self._fresh[rank] = time.monotonic()  # not asked for yet

    def _take(self, rank: int, text: bytes) -> None:
        pulse, before = Pulse.decode(text), self._pulses.get(rank)
        if before is None or pulse.published != before.published:
            self._fresh[rank] = time.monotonic()
        self._pulses[rank] = pulse

    def _look(self) -> bool:
        """Tell what is new; whether some rank is stuck."""
        now = time.monotonic()
        silent = {rank: now - fresh for rank, fresh in self._fresh.items()}
        self._look_for_moving(silent)
        found = find_stuck(self._pulses, silent, self.silence_limit)
        for each in found:
            new = tuple(rank for rank in each.ranks if rank not in self._told)
            if new:
                self._told |= {rank: self._pulses.get(rank) for rank in new}
                self._tell(replace(each, ranks=new))
        return bool(found)

    def _look_for_moving(self, silent: Mapping[int, float]) -> None:
        moving = []
        for rank, then in self._told.items():
            now = self._pulses.get(rank)
            if now is None or silent[rank] > self.silence_limit:
                continue
            if then is None or (now.beats, now.collectives) != (then.beats, then.collectives):
                moving.append(rank)
        for rank in moving:
            del self._told[rank]
        if moving:
            self._tell_moving(moving)

    def _end_run(self, end: Callable[[], None]) -> None:
        for rank in self._told:
            self.store.set(f"end-{rank}", "")
        # Their end makes collectives of other ranks fail, which then end in order.
        if not self._closed.wait(_GRACE_SECONDS + 4 * self.seconds):
            end()

    def close(self) -> None:
        """Stop the watch."""
        self._closed.set()
        self._thread.join()
