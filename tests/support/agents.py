"""A run on torchrun agents of this machine, for tests that wait for what its log says."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from convoy.chaos import Machines
from tests.support.jobs import events_so_far

ROOT = Path(__file__).resolve().parents[2]


class Watched:
    """A launch whose log is read while it runs. The launch itself is the other base class."""

    run_dir: Path

    @property
    def running(self) -> bool:
        """Whether some machine's torchrun runs."""
        raise NotImplementedError

    def output(self) -> str:
        """What the machines have printed, for a report of a failure."""
        raise NotImplementedError

    def exit_codes(self) -> list[int]:
        """Of each machine's torchrun; waits until they have ended."""
        raise NotImplementedError

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the log has of one kind of event."""
        return [event for event in events_so_far(self.run_dir) if event["event"] == kind]

    def wait(self, what: Callable[[], Any], seconds: float = 300.0) -> None:
        """Wait until ``what`` is so; fails with the machines' output."""
        until = time.monotonic() + seconds
        while not what():
            assert self.running, self.output()
            assert time.monotonic() < until, self.output()
            time.sleep(0.05)

    def wait_for_step(self, step: int, starts: int) -> None:
        """Wait until the launch has begun ``starts`` times, and has taken ``step`` since."""

        def reached() -> bool:
            began = self.events("start")
            if len(began) < starts:
                return False
            since = [e for e in self.events("step") if e["time"] > began[-1]["time"]]
            return bool(since) and since[-1]["step"] >= step

        self.wait(reached)

    def wait_for_end(self, seconds: float = 400.0) -> list[int]:
        """The exit codes of the machines that were not lost."""
        until = time.monotonic() + seconds
        while self.running:
            assert time.monotonic() < until, self.output()
            time.sleep(0.1)
        return self.exit_codes()


class Agents(Machines, Watched):
    """The machines of a run of ``spec``, whose folder is ``run_dir``."""

    def __init__(
        self,
        spec: Path,
        run_dir: Path,
        least: int,
        most: int,
        *,
        conf: dict[str, str] | None = None,
        backend: str = "c10d",
        endpoint: str | None = None,
    ) -> None:
        self.run_dir = run_dir
        command = [str(ROOT / "tools/pretrain.py"), str(spec)]
        super().__init__(command, run_dir.parent / "machines", least=least, most=most)
        self.conf |= conf or {}
        self.backend, self.endpoint = backend, endpoint or self.endpoint

    def kill_rank(self, number: int) -> None:
        """SIGKILL to the rank of a machine."""
        for pid in self.ranks(number):
            os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def agents(spec: Path, run_dir: Path, *, least: int, most: int, **options: Any) -> Iterator[Agents]:
    """Machines that are ended with all of their ranks, however the test ends."""
    launch = Agents(spec, run_dir, least, most, **options)
    with contextlib.closing(launch):
        yield launch
