"""SIGKILLs of ranks at random moments of a run: in a step, in a save, and while ranks start."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import statistics
import time
from collections import Counter
from pathlib import Path

from convoy.chaos.launched import Launch, is_running

MOMENTS = {"step": 4, "save": 3, "start": 5}
"""How often each moment is drawn. ``step``: within two steps, after all ranks have taken a step
together. ``save``: after objects of a checkpoint have begun to appear. ``start``: while ranks that
were killed are started again, or meet, or get the run's state, or soon after."""
_RANKS = {"one": 12, "two": 5, "all": 1}
"""How many ranks are killed at once, and how often."""
_PARENT = 0.02
"""How often the process that torchrun has started is killed with the one that trains: torchrun then
starts all ranks anew."""
_SAVE_SECONDS = 0.08
"""Objects of a tiny model are written and committed in about this time."""


class Striker:
    """Kills ranks of a launch, and counts the kills."""

    def __init__(self, launch: Launch, seed: int) -> None:
        self.launch, self.draw = launch, random.Random(seed)
        self.kills = 0
        self.by_moment: Counter[str] = Counter()
        """Kills, by what the run did."""
        self.together = 0
        """Kills that hit more ranks than one at once."""
        self.parents = 0
        """Kills of processes that torchrun had started."""
        self.recoveries: list[float] = []
        """Seconds from a kill to the first step of all ranks; of those that were waited for."""
        self._struck = 0.0
        self._steps: list[float] = []

    def strike(self) -> None:
        """Wait for a random moment, and kill.

        Raises HangError where the run does not go on after the kill before.
        """
        moment = self.draw.choices(list(MOMENTS), list(MOMENTS.values()))[0]
        if not self.recoveries:
            moment = "step"  # how long a start takes is not known yet
        if moment == "start":
            time.sleep(self.draw.uniform(0.0, 1.2 * statistics.median(self.recoveries[-9:])))
        else:
            self.wait_until_whole()
            if moment == "save":
                self._wait_for_save()
            else:
                time.sleep(self.draw.uniform(0.0, 2 * self._step_seconds()))
        how = self.draw.choices(list(_RANKS), list(_RANKS.values()))[0]
        killed = self._kill({"one": 1, "two": 2, "all": self.launch.world}[how])
        self.by_moment[moment] += killed

    def wait_until_whole(self) -> None:
        """Wait until all ranks train. Raises HangError where they do not come."""
        self.launch.watched.look()
        self.launch.wait_for_all(self._struck)
        if self._struck:
            self.recoveries.append(self.launch.watched.step_time - self._struck)

    def _step_seconds(self) -> float:
        """About the time of a step: the time to the next one."""
        seen = self.launch.watched
        step, began = seen.step, time.monotonic()
        self.launch.wait(lambda: seen.step > step, "a step")
        self._steps.append(time.monotonic() - began)
        return statistics.median(self._steps[-9:])

    def _wait_for_save(self) -> None:
        objects = self.launch.run / "checkpoints" / "objects"
        before = _names(objects)
        self.launch.wait(lambda: _names(objects) - before, "a save")
        time.sleep(self.draw.uniform(0.0, _SAVE_SECONDS))

    def _kill(self, count: int) -> int:
        """SIGKILL to so many ranks that have a process now; returns how many were killed."""
        ranks = self.launch.ranks()
        with_parent = self.draw.random() < _PARENT
        killed = 0
        for rank in self.draw.sample(sorted(ranks), min(count, len(ranks))):
            parent, trains = ranks[rank]
            hit = [pid for pid in {parent, trains} if with_parent or pid == trains]
            killed += max(map(_sigkill, hit))
            self.parents += parent in hit
        if killed:
            self._struck = time.time()
        self.kills += killed
        self.together += killed if killed > 1 else 0
        return killed


def _sigkill(process: int) -> bool:
    """Whether the process ran, and has got a SIGKILL."""
    with contextlib.suppress(ProcessLookupError):
        if is_running(process):
            os.kill(process, signal.SIGKILL)
            return True
    return False


def _names(folder: Path) -> set[str]:
    with contextlib.suppress(OSError):
        return {entry.name for entry in folder.iterdir()}
    return set()
